"""Fixtures for the biLM's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from bilm_small import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files of sentences and a vocabulary, which no test changes."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))
