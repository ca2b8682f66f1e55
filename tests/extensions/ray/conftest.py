"""The fixtures of the command's tests."""

from tests.support.commands import equipoise, no_trace, project, quick

__all__ = ["equipoise", "no_trace", "project", "quick"]
