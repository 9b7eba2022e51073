"""What can go wrong with perf_analyzer, one clear message each.

AnalyzerError
├── MissingAnalyzerError   there is none that runs here, and none can be fetched
└── FailedRunError         it has failed, has seen a request fail, or hasn't sent what it was asked to
"""


class AnalyzerError(Exception):
    """Base of all; `str()` is what the user reads."""


class MissingAnalyzerError(AnalyzerError):
    """No perf_analyzer runs on this machine, and none can be fetched."""


class FailedRunError(AnalyzerError):
    """A run that must not be taken for a measurement."""
