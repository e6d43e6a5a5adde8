"""Runs Triton kernels in Triton's interpreter where there is no GPU: decided before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
