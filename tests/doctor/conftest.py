"""The browser is the report's."""

from tests.report.conftest import browser

__all__ = ["browser"]
