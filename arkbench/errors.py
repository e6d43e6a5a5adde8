"""Errors that are the user's to mend: the command line prints the one line and ends with exit code 2."""

from __future__ import annotations


class UserError(Exception):
    """What is wrong, where, and what to do about it, in one line."""
