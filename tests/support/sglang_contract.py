"""Finds names in the source of an SGLang with `ast`, without an import."""

from __future__ import annotations

import ast
import gc
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A definition: its node (a statement or a module) and the dotted name of its module."""

    node: ast.AST
    module: str

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_property(self) -> bool:
        return isinstance(self.node, FunctionNode) and any(
            ast.unparse(decorator).rpartition(".")[2] in ("property", "cached_property", "setter")
            for decorator in self.node.decorator_list
        )


@dataclass(frozen=True)
class Signature:
    """Parameters of a function: names by position, names by keyword only, and which of them have no default."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    has_args: bool
    has_kwargs: bool

    @classmethod
    def of(cls, node: FunctionNode) -> Signature:
        arguments = node.args
        positional = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
        keyword_only = tuple(argument.arg for argument in arguments.kwonlyargs)
        required = set(positional[: len(positional) - len(arguments.defaults)])
        required |= {name for name, default in zip(keyword_only, arguments.kw_defaults, strict=True) if default is None}
        has_args, has_kwargs = arguments.vararg is not None, arguments.kwarg is not None
        return cls(positional, keyword_only, frozenset(required), has_args, has_kwargs)

    def __str__(self) -> str:
        names = [*self.positional, *(["*"] if self.keyword_only or self.has_args else []), *self.keyword_only]
        return f"({', '.join(names + (['**'] if self.has_kwargs else []))})"


class SourceTree:
    """The Python source of one SGLang: a wheel, or a folder that holds the package `sglang`.

    All trees of one path share their parsed modules, so that each module of a wheel is parsed once per process.
    """

    _parsed: ClassVar[dict[Path, dict[str, ast.Module | None]]] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._modules = self._parsed.setdefault(path, {})

    @cached_property
    def _archive(self) -> zipfile.ZipFile | None:
        return zipfile.ZipFile(self.path) if self.path.is_file() else None

    def _read(self, name: str) -> bytes | None:
        if self._archive is not None:
            return self._archive.read(name) if name in self._archive.NameToInfo else None
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def module(self, name: str) -> ast.Module | None:
        """The parsed module `name`, None when there is none."""
        if name not in self._modules:
            base = name.replace(".", "/")
            source = self._read(f"{base}.py")
            if source is None:
                source = self._read(f"{base}/__init__.py")
            self._modules[name] = None if source is None else _parse(source)
        return self._modules[name]

    def find(self, path: str) -> Definition | None:
        """Resolves a dotted path: module, then names in it; follows imports, base classes and instance attributes."""
        return self._find(path, frozenset())

    def _find(self, path: str, seen: frozenset[str]) -> Definition | None:
        if path in seen:  # two modules that import a name from each other
            return None
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            module_name = ".".join(parts[:length])
            module = self.module(module_name)
            if module is None:
                continue
            found: Definition | None = Definition(module, module_name)
            for name in parts[length:]:
                found = self._member(found, name, seen | {path}) if found else None
            return found
        return None

    def _member(self, owner: Definition, name: str, seen: frozenset[str]) -> Definition | None:
        if isinstance(owner.node, ast.Module):
            return self._in_module(owner, name, seen)
        if isinstance(owner.node, ast.ClassDef):
            return self._in_class(owner, name, seen)
        return None

    def _in_module(self, owner: Definition, name: str, seen: frozenset[str]) -> Definition | None:
        for statement in _bindings(owner.node).get(name, ()):
            if isinstance(statement, ast.ImportFrom):
                original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
                found = self._find(f"{_imported_module(statement, owner.module)}.{original}", seen)
                if found is not None:
                    return found
            else:
                return Definition(statement, owner.module)
        return None

    def _in_class(self, owner: Definition, name: str, seen: frozenset[str]) -> Definition | None:
        own = _bindings(owner.node).get(name) or _instance_attributes(owner.node).get(name)
        if own:
            return Definition(own[0], owner.module)
        for base in self.bases(owner, seen):
            found = self._in_class(base, name, seen)
            if found is not None:
                return found
        return None

    def bases(self, owner: Definition, seen: frozenset[str] = frozenset()) -> list[Definition]:
        """The base classes of a class that are SGLang's."""
        assert isinstance(owner.node, ast.ClassDef)
        found = [self._find(f"{owner.module}.{ast.unparse(base)}", seen) for base in owner.node.bases]
        return [base for base in found if base is not None and base.is_class]

    def signature(self, definition: Definition) -> Signature | None:
        """Parameters of a function, or of a class's `__init__` without `self`; None if it has none."""
        if isinstance(definition.node, FunctionNode):
            return Signature.of(definition.node)
        if isinstance(definition.node, ast.ClassDef):
            init = self._in_class(definition, "__init__", frozenset())
            if init is not None and isinstance(init.node, FunctionNode):
                whole = Signature.of(init.node)
                this, *positional = whole.positional
                return replace(whole, positional=tuple(positional), required=whole.required - {this})
        return None

    def members(self, definition: Definition) -> dict[str, ast.stmt]:
        """Methods, properties and class variables in the body of a class, by name."""
        return {name: statements[0] for name, statements in _bindings(definition.node).items()}


def _parse(source: bytes) -> ast.Module:
    """`ast.parse`; the garbage collector never visits the result.

    With its millions of nodes each collection of the rest of the session would take a second or more.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@cache
def _bindings(owner: ast.AST) -> dict[str, list[ast.stmt]]:
    """Names bound in the body of a module or class, also inside `if`, `try` and `with`."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in _statements(owner):
        for name in _bound_names(statement):
            found.setdefault(name, []).append(statement)
    return found


def _statements(owner: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(owner, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(child)


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | FunctionNode):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def _instance_attributes(owner: ast.ClassDef) -> dict[str, list[ast.stmt]]:
    """Names that a method of the class sets on its first parameter."""
    found: dict[str, list[ast.stmt]] = {}
    for method in owner.body:
        if not isinstance(method, FunctionNode) or not method.args.args:
            continue
        this = method.args.args[0].arg
        for statement in ast.walk(method):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = [part for target in statement.targets for part in getattr(target, "elts", [target])]
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == this:
                    found.setdefault(target.attr, []).append(statement)  # type: ignore[arg-type]
    return found


def _imported_module(statement: ast.ImportFrom, module: str) -> str:
    if not statement.level:
        return statement.module or ""
    package = module.split(".")[: -statement.level]
    return ".".join([*package, *([statement.module] if statement.module else [])])
