import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("exhaustive") is None)
