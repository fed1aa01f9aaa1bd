"""No key of the schema goes unread: for each one without a mark, code outside `config` reads that attribute.

The code is not run but its types are followed: annotations of arguments, fields and return values, assignments to
`self` and to local names. `x.lr` counts for `OptimizerConfig.lr` when `x` is known to be an `OptimizerConfig`, or when
it is called as the schema calls that section (`optimizer.lr`). A read of the same name on anything else does not count.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import areal_like
from areal_like.config import RLConfig, paths
from areal_like.config.fields import Section, is_marked

PACKAGE = Path(areal_like.__file__).parent


def schema() -> tuple[dict[str, type[Section]], dict[type[Section], set[str]], list[tuple[type[Section], str]]]:
    """Sections by class name; the keys under which each occurs; and all (section, key) that code must read."""
    classes: dict[str, type[Section]] = {"RLConfig": RLConfig}
    names: dict[type[Section], set[str]] = defaultdict(set)
    wanted: list[tuple[type[Section], str]] = []
    queue: list[type[Section]] = [RLConfig]
    while queue:
        model = queue.pop()
        for name, field in paths.fields(model).items():
            if is_marked(field):
                continue
            inner = paths.section_of(field)
            if inner is None or _something_to_read(inner):
                wanted.append((model, name))
            if inner is not None:
                names[inner].add(name)
                if inner.__name__ not in classes:
                    classes[inner.__name__] = inner
                    queue.append(inner)
    for model in list(classes.values()):  # the classes that engines are annotated with
        for base in model.__mro__[1:]:
            if issubclass(base, Section) and base is not Section:
                classes.setdefault(base.__name__, base)
    return classes, names, wanted


def _something_to_read(model: type[Section]) -> bool:
    return any(not is_marked(field) for _, field in paths.keys(model) if paths.section_of(field) is None)


class Code:
    """What the project's own code says about types: attributes of its classes and results of its functions."""

    def __init__(self, sources: dict[str, str], classes: dict[str, type[Section]]) -> None:
        self.classes = classes
        self.trees = {name: ast.parse(text) for name, text in sources.items()}
        self.own = {n.name for t in self.trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
        self.attributes: dict[tuple[str, str], str] = {}
        self.results: dict[str, str] = {"load_config": "RLConfig"}
        self.reads: set[tuple[str, str]] = set()
        self.named_reads: set[tuple[str, str]] = set()
        for _ in range(3):  # until types have travelled through assignments
            for tree in self.trees.values():
                self.scope(tree.body, {}, None)

    def annotation(self, node: ast.expr | None) -> str | None:
        if node is None:
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        known = {
            n.id if isinstance(n, ast.Name) else n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Name | ast.Attribute)
            and (n.id if isinstance(n, ast.Name) else n.attr) in (*self.classes, *self.own)
        }
        return "|".join(sorted(known)) or None

    def type_of(self, node: ast.expr, local: dict[str, str]) -> str | None:
        if isinstance(node, ast.Name):
            return local.get(node.id)
        if isinstance(node, ast.Attribute):
            return self.attribute(self.type_of(node.value, local), node.attr)
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            return name if name in self.own or name in self.classes else self.results.get(name)
        options: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            options = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            options = node.values
        elif isinstance(node, ast.NamedExpr | ast.Await):
            options = [node.value]
        return next((found for option in options if (found := self.type_of(option, local))), None)

    def attribute(self, owner: str | None, name: str) -> str | None:
        """The type of an attribute; of a union `A|B`, that of the first member that has it."""
        for kind in (owner or "").split("|"):
            field = paths.fields(self.classes[kind]).get(name) if kind in self.classes else None
            inner = paths.section_of(field) if field else None
            if found := inner.__name__ if inner else self.attributes.get((kind, name)):
                return found
        return None

    def scope(self, body: list[ast.stmt], local: dict[str, str], owner: str | None) -> None:
        """Follow a block whose statements share local names; `owner` is the class around it."""
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                for inner in statement.body:
                    if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                        self.learn_attribute(statement.name, inner.target.id, self.annotation(inner.annotation))
                self.scope(statement.body, dict(local), statement.name)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.function(statement, local, owner)
            else:
                for node in self.walk(statement):
                    self.node(node, local, owner)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, outer: dict[str, str], owner: str | None) -> None:
        if result := self.annotation(node.returns):
            self.results[node.name] = result
            if owner and any(isinstance(d, ast.Name) and "property" in d.id for d in node.decorator_list):
                self.learn_attribute(owner, node.name, result)
        inside = dict(outer)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            inside.pop(argument.arg, None)
            if kind := self.annotation(argument.annotation):
                inside[argument.arg] = kind
        if owner and arguments and arguments[0].arg == "self":
            inside["self"] = owner
        self.scope(node.body, inside, owner)

    def walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Nodes in source order; functions and classes inside are followed as scopes of their own."""
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield child
            else:
                yield from self.walk(child)

    def node(self, node: ast.AST, local: dict[str, str], owner: str | None) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.scope([node], local, owner)
        elif isinstance(node, ast.AnnAssign):
            self.assign(node.target, self.annotation(node.annotation), local, owner)
        elif isinstance(node, ast.NamedExpr):
            self.assign(node.target, self.type_of(node.value, local), local, owner)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=False):
                        self.assign(one, self.type_of(value, local), local, owner)
                else:
                    self.assign(target, self.type_of(node.value, local), local, owner)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self.read(node.value, node.attr, local)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant):
                self.read(node.args[0], str(name.value), local)

    def assign(self, target: ast.expr, kind: str | None, local: dict[str, str], owner: str | None) -> None:
        if isinstance(target, ast.Name):
            local.pop(target.id, None)
            if kind:
                local[target.id] = kind
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            holder = owner if target.value.id == "self" else local.get(target.value.id)
            self.learn_attribute(holder, target.attr, kind)

    def learn_attribute(self, owner: str | None, name: str, kind: str | None) -> None:
        if owner and kind:
            self.attributes[owner, name] = kind

    def read(self, value: ast.expr, name: str, local: dict[str, str]) -> None:
        kind = self.type_of(value, local)
        if kind is not None:
            self.reads |= {(one, name) for one in kind.split("|")}
            if name == "model_dump" and kind in self.classes:
                self.reads |= {(kind, field) for field in paths.fields(self.classes[kind])}
            return
        last = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else None
        if last is not None:
            self.named_reads.add((last, name))


def unread(sources: dict[str, str]) -> list[str]:
    """`Section.key` for every key that no source reads."""
    classes, names, wanted = schema()
    code = Code(sources, classes)
    missing = []
    for model, name in wanted:
        related = {k for k, c in classes.items() if issubclass(model, c) or issubclass(c, model)}
        by_type = any((kind, name) in code.reads for kind in related)
        by_name = any((key, name) in code.named_reads for key in names[model])
        if not by_type and not by_name:
            missing.append(f"{model.__name__}.{name}")
    return missing


def project() -> dict[str, str]:
    return {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "config"
    }


def test_every_key_is_read() -> None:
    assert unread(project()) == []


@pytest.mark.parametrize(
    ("code", "is_read"),
    [
        ("def f(o: OptimizerConfig):\n    return o.lr", True),
        ("def f(o: 'OptimizerConfig | None'):\n    return o.lr", True),
        ("def f(config: RLConfig):\n    return config.actor.optimizer.lr", True),
        ("def f(config: TrainEngineConfig):\n    o = config.optimizer\n    return o.lr", True),
        ("class A:\n    config: ActorConfig\n    def f(self):\n        return self.config.optimizer.lr", True),
        ("class A:\n    def __init__(self, c: RLConfig):\n        self.x = c.actor\n    def f(self):\n"
         "        return self.x.optimizer.lr", True),
        ("class A:\n    def __init__(self, c: RLConfig):\n        self.x, self.y = c.actor, 1\n"
         "class B:\n    def __init__(self, a: A):\n        self.a = a\n"
         "    def f(self):\n        return self.a.x.optimizer.lr", True),
        ("x = load_config('a').actor.optimizer.lr", True),
        ("def g(c) -> OptimizerConfig: ...\ny = g(1).lr", True),
        ("def f(actor):\n    return actor.optimizer.lr", True),
        ("def f(optimizer):\n    return getattr(optimizer, 'lr')", True),
        ("def f(c: RLConfig):\n    return [1 for _ in range(3) if c.actor.optimizer.lr]", True),
        ("def f(c: RLConfig):\n    def g():\n        return c.actor.optimizer.lr", True),
        ("def f(o: NormConfig | OptimizerConfig):\n    return o.lr", True),
        ("def f(o: OptimizerConfig):\n    return o.model_dump()", True),
        ("def f(o: OptimizerConfig):\n    return o.eps", False),
        ("def f(o):\n    return o.lr", False),
        ("def f(o: GenerationConfig):\n    return o.lr", False),
        ("def f(o: OptimizerConfig):\n    o = 1\n    return o.lr", False),
        ("def f(o: OptimizerConfig):\n    o.lr = 1", False),
        ("lr = 1\n'optimizer.lr'", False),
    ],
)  # fmt: skip
def test_what_counts_as_a_read(code: str, is_read: bool) -> None:
    assert ("OptimizerConfig.lr" not in unread({"x.py": code})) == is_read


def test_without_code_every_key_is_unread() -> None:
    missing = unread({})
    assert len(missing) == len(schema()[2]) > 80
    assert {"ActorConfig.eps_clip", "OptimizerConfig.lr", "DDPConfig.bucket_size", "GenerationConfig.top_p"} <= set(
        missing
    )
    assert "TrainDatasetConfig.pin_memory" not in missing and "RLConfig.vllm" not in missing
