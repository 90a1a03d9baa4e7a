"""Exceptions and warnings of the package. Imports nothing."""


class KernelError(RuntimeError):
    """A kernel did not compile or did not launch; the message holds its name and the log."""


class PerformanceWarning(UserWarning):
    """A plain kernel runs although a fast one exists for other sizes."""
