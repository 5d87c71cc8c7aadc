"""Errors in the sources of hfq: message, expected and found values, and fix. Nothing is run.

A text that depends on values is a template, with names in braces.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ErrorCall", "Module", "error_calls", "error_classes", "read_modules"]

BASE = "HfqError"
_SUGGESTS = "nearest"
"""Function that returns ` Did you mean 'x'?`, or no text."""
_MOST_TEXTS = 6
_DEPTH = 4
"""Maximum number of functions, loops, and names that are followed to find a text."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Bindings = dict[str, "Bound"]


@dataclass(frozen=True)
class Bound:
    """Expression, and the scope that resolves its names."""

    node: ast.AST
    scope: Scope


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: Dotted name.
        tree: Syntax tree.
        parents: Parent of each node.
        calls: Calls, keyed by the name of the function.
        imports: Imported names.
    """

    name: str
    tree: ast.Module
    parents: Mapping[ast.AST, ast.AST] = field(repr=False)
    calls: Mapping[str, list[ast.Call]] = field(repr=False)
    imports: frozenset[str] = field(repr=False)

    @property
    def summary(self) -> str:
        """First paragraph of its docstring."""
        return " ".join((ast.get_docstring(self.tree) or "").partition("\n\n")[0].split())


@dataclass(frozen=True)
class Scope:
    """Place of an expression: its module, the functions around it, and values of their parameters."""

    module: Module
    functions: tuple[ast.AST, ...] = ()
    bindings: Bindings = field(default_factory=dict)
    depth: int = 0

    def bound(self, more: Bindings) -> Scope:
        return Scope(self.module, self.functions, self.bindings | more, self.depth + 1)


@dataclass(frozen=True)
class ErrorCall:
    """One error: the alternatives of each text, and its place in the sources."""

    cls: str
    module: Module
    line: int
    message: tuple[str, ...]
    expected: tuple[str, ...]
    found: tuple[str, ...]
    fix: tuple[str, ...]


@functools.cache
def read_modules(package: Path) -> list[Module]:
    """Returns the modules of a package, sorted by name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parents, calls, imports = {}, {}, set()
        for node in ast.walk(tree):
            parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
            if isinstance(node, ast.Call):
                calls.setdefault(getattr(node.func, "id", getattr(node.func, "attr", None)), []).append(node)
            elif isinstance(node, ast.ImportFrom):
                imports |= {alias.name for alias in node.names}
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(part for part in parts if part != "__init__")
        found.append(Module(name, tree, parents, calls, frozenset(imports)))
    return found


def error_classes(modules: list[Module]) -> dict[str, str]:
    """Returns {name of an error class: first line of its docstring}, bases before derived classes."""
    classes = [node for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef)]
    found = {BASE: ""}
    grows = True
    while grows:
        before = len(found)
        for node in classes:
            if node.name == BASE or any(
                isinstance(base, ast.Name) and base.id in found for base in node.bases
            ):
                found[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
        grows = len(found) > before
    return found


def error_calls(modules: list[Module]) -> list[ErrorCall]:
    """Returns all errors of the modules, without those that repeat the texts of another error."""
    classes = error_classes(modules)
    found = []
    for module in modules:
        for node in (node for name in classes for node in module.calls.get(name, ())):
            if not _repeats_a_message(node.args[0]):
                found += [_described(node, scope) for scope in _scopes(node, modules, module)]
    return sorted(found, key=lambda error: (error.module.name, error.line, error.message))


def _repeats_a_message(node: ast.expr) -> bool:
    """True for `error.message`, and for a function of it that only rewrites the names of options."""
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return isinstance(node, ast.Attribute) and node.attr == "message"


def _described(node: ast.Call, scope: Scope) -> ErrorCall:
    """Returns the error of a call. An error that a helper constructs belongs to the caller's module."""
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    caller, line = scope.module, node.lineno
    for bound in scope.bindings.values():
        if bound.scope.module is not scope.module:
            caller, line = bound.scope.module, getattr(bound.node, "lineno", node.lineno)
    texts = {
        name: tuple(_texts(keywords[name], scope)) if name in keywords else ()
        for name in ("expected", "found", "fix")
    }
    return ErrorCall(node.func.id, caller, line, tuple(_texts(node.args[0], scope)), **texts)


def _scopes(node: ast.Call, modules: list[Module], module: Module) -> list[Scope]:
    """Returns one scope for each caller of the helper around a call, and for each element of loops there."""
    functions = tuple(parent for parent in _ancestors(node, module) if isinstance(parent, _FUNCTIONS))
    scopes = [Scope(module, functions)]
    if functions and _is_a_helper(node, functions[0], module):
        calls = list(_callers(functions[0], modules, module))
        scopes = [Scope(module, functions, bindings) for bindings in calls] or scopes
    return [loop for scope in scopes for loop in _in_loops(node, scope)]


def _is_a_helper(node: ast.Call, function: ast.AST, module: Module) -> bool:
    """True if a function returns the error, or if its message or fix is one of its parameters."""
    names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    texts = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "fix")]
    return isinstance(module.parents[node], ast.Return) or any(
        isinstance(text, ast.Name) and text.id in names for text in texts
    )


def _callers(function: ast.AST, modules: list[Module], own: Module) -> Iterator[Bindings]:
    """Yields the values of a function's parameters for each of its calls in the package."""
    names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
    for module in modules:
        if module is not own and function.name not in module.imports:
            continue
        for node in module.calls.get(function.name, ()):
            around = tuple(parent for parent in _ancestors(node, module) if isinstance(parent, _FUNCTIONS))
            scope = Scope(module, around, depth=1)
            given = dict(zip(names, node.args, strict=False)) | {
                word.arg: word.value for word in node.keywords if word.arg
            }
            yield {name: Bound(value, scope) for name, value in given.items()}


def _ancestors(node: ast.AST, module: Module) -> Iterator[ast.AST]:
    while (node := module.parents.get(node)) is not None:
        yield node


def _in_loops(node: ast.AST, scope: Scope) -> list[Scope]:
    """Returns one scope for each element of the literal tables that loops around a node iterate over."""
    scopes = [scope]
    loops = [loop for parent in _ancestors(node, scope.module) for loop in _loops_of(parent)]
    for loop in reversed(loops):
        scopes = [bound for each in scopes for bound in _elements(loop, each)]
    return scopes


def _loops_of(node: ast.AST) -> list[ast.For | ast.comprehension]:
    """Returns the loops of a statement or of a generator expression, innermost first."""
    if isinstance(node, ast.GeneratorExp):
        return node.generators[::-1]
    return [node] if isinstance(node, ast.For) else []


def _elements(loop: ast.For | ast.comprehension, scope: Scope) -> list[Scope]:
    iterable, is_items = loop.iter, False
    if (
        isinstance(iterable, ast.Call)
        and isinstance(iterable.func, ast.Attribute)
        and iterable.func.attr == "items"
    ):
        iterable, is_items = iterable.func.value, True
    for bound in _followed(iterable, scope):
        if is_items and isinstance(bound.node, ast.Dict):
            pairs = [
                ast.Tuple([key, value]) for key, value in zip(bound.node.keys, bound.node.values, strict=True)
            ]
        elif not is_items and isinstance(bound.node, ast.Tuple | ast.List):
            pairs = bound.node.elts
        else:
            continue
        return [scope.bound(_unpacked(loop.target, pair, bound.scope)) for pair in pairs]
    return [scope]


def _unpacked(target: ast.AST, value: ast.AST, scope: Scope) -> Bindings:
    if isinstance(target, ast.Name):
        return {target.id: Bound(value, scope)}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return {name: bound for each, part in pairs for name, bound in _unpacked(each, part, scope).items()}
    return {}


def _followed(node: ast.AST, scope: Scope) -> list[Bound]:
    """Returns the possible expressions of a name, a field, or an element of a table."""
    if scope.depth > _DEPTH:
        return []
    if isinstance(node, ast.Name):
        return _named(node.id, scope)
    if isinstance(node, ast.IfExp):
        return [
            bound
            for branch in (node.body, node.orelse)
            for bound in (_followed(branch, scope) or [Bound(branch, scope)])
        ]
    if isinstance(node, ast.Attribute):
        made = [bound for bound in _followed(node.value, scope) if isinstance(bound.node, ast.Call)]
        return [found for bound in made for found in _field(bound, node.attr)]
    if isinstance(node, ast.Subscript):
        return [
            found
            for bound in _followed(node.value, scope)
            for found in _element(bound, Bound(node.slice, scope))
        ]
    return [Bound(node, scope)]


def _named(name: str, scope: Scope) -> list[Bound]:
    if name in scope.bindings:
        bound = scope.bindings[name]
        deeper = Scope(bound.scope.module, bound.scope.functions, bound.scope.bindings, scope.depth + 1)
        return _followed(bound.node, deeper)
    deeper = scope.bound({})
    for body in (*scope.functions, scope.module.tree):
        nodes = ast.walk(body) if isinstance(body, _FUNCTIONS) else body.body
        values = [
            node.value
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and _assigns(node, name)
        ]
        if values:
            return [found for value in values for found in _followed(value, deeper)]
    return []


def _assigns(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _field(made: Bound, name: str) -> list[Bound]:
    """Returns a field of an object that a call of a class of the same module constructs."""
    call = made.node
    for keyword in call.keywords:
        if keyword.arg == name:
            return [Bound(keyword.value, made.scope)]
    for node in made.scope.module.tree.body:
        if isinstance(node, ast.ClassDef) and isinstance(call.func, ast.Name) and node.name == call.func.id:
            fields = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
            if name in fields[: len(call.args)]:
                return [Bound(call.args[fields.index(name)], made.scope)]
    return []


def _element(table: Bound, index: Bound) -> list[Bound]:
    """Returns an element of a tuple or dict, or all elements of a dict if the key is not constant."""
    keys = [
        bound.node.value
        for bound in _followed(index.node, index.scope)
        if isinstance(bound.node, ast.Constant)
    ]
    if isinstance(table.node, ast.Tuple | ast.List):
        return [
            Bound(table.node.elts[key], table.scope)
            for key in keys
            if isinstance(key, int) and key < len(table.node.elts)
        ]
    if isinstance(table.node, ast.Dict):
        pairs = zip(table.node.keys, table.node.values, strict=True)
        values = [value for key, value in pairs if not keys or getattr(key, "value", None) in keys]
        return [
            found
            for value in values
            for found in (_followed(value, table.scope) or [Bound(value, table.scope)])
        ]
    return []


def _texts(node: ast.AST, scope: Scope) -> list[str]:
    """Returns the possible texts of an expression, as templates."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [_texts(part, scope) for part in node.values]
        return [*map("".join, itertools.islice(itertools.product(*parts), _MOST_TEXTS))]
    if isinstance(node, ast.FormattedValue):
        return _filled(node.value, scope)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = itertools.product(_texts(node.left, scope), _texts(node.right, scope))
        return [left + right for left, right in itertools.islice(both, _MOST_TEXTS)]
    if isinstance(node, ast.BoolOp):
        return [*dict.fromkeys(text for value in node.values for text in _texts(value, scope))]
    bounds = [bound for bound in _followed(node, scope) if bound.node is not node]
    texts = [text for bound in bounds for text in _texts(bound.node, bound.scope)]
    return [*dict.fromkeys(texts)][:_MOST_TEXTS] or [_placeholder(node)]


def _filled(node: ast.AST, scope: Scope) -> list[str]:
    """Returns the possible texts of a field of a template, or its name in braces if they are not literals."""
    texts = (
        _texts(node, scope) if isinstance(node, ast.Name | ast.IfExp | ast.Attribute | ast.Constant) else []
    )
    return texts if texts and len(texts) <= _MOST_TEXTS else [_placeholder(node)]


def _placeholder(node: ast.AST) -> str:
    """Returns the name of a value, in braces."""
    while True:
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == _SUGGESTS:
            return "{suggestion}"
        if isinstance(node, ast.Call):
            node = node.args[0] if node.args else node.func
        elif isinstance(node, ast.Subscript | ast.Starred | ast.FormattedValue):
            node = node.value
        elif isinstance(node, ast.BoolOp):
            node = node.values[0]
        elif isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
            node = node.elt
        else:
            break
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "…"
    return "{" + name.strip("_").replace("_", " ") + "}"
