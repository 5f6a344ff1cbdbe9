"""What type checkers read of the package: its marker, and the compiled core's stub, which must match the bindings."""

from __future__ import annotations

import ast
from pathlib import Path

import fastrnn
from fastrnn import _C

PACKAGE = Path(fastrnn.__file__).parent


def _declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Public names that a stub's statements declare."""
    found = {}
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            found[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign):
            found[statement.target.id] = statement
    return {name: statement for name, statement in found.items() if not name.startswith("_")}


def _public(of: object) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_the_stub_has_the_names_of_the_core():
    stub = _declared(ast.parse((PACKAGE / "_C.pyi").read_text()).body)
    assert set(stub) == _public(_C)
    for name, statement in stub.items():
        if isinstance(statement, ast.ClassDef):
            assert set(_declared(statement.body)) == _public(getattr(_C, name)), name
