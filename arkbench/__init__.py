"""arkbench: checks published performance claims of a language-model server on the reader's own hardware."""

__version__ = "0.1.0"
