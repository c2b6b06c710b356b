"""Fixtures of the tests of HTML pages."""

from tests.fedssl.pages.browser import browser, open_page  # noqa: F401, fixtures
