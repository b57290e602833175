"""Pictures without files."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def unsaved(monkeypatch):
    """Figures are made and not saved, for tests of what is said beside them: to save one takes longest."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: None)
