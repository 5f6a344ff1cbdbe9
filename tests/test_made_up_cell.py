"""Adding a cell takes one header, its lines in cells.inc, a reference step and a class."""

from __future__ import annotations

import shutil
from pathlib import Path

import made_up_cell
import pytest


@pytest.mark.builds
@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="no cmake and ninja to build with")
def test_made_up_cell(tmp_path: Path) -> None:
    copy = tmp_path / "fastrnn"
    made_up_cell.make(copy)
    made_up_cell.build(copy)
    made_up_cell.check(copy)
