"""Print how the packages are built: sizes, import cycles, broad excepts, late imports. It judges and changes nothing.

    python scripts/structure.py [DIRECTORY ...]     # a directory is a package; without one, this repository's two

What is longer than `LIMITS` says why in a comment `# long: ...`, on the line of its `class` or `def`, or on a line of
its own for a module. A broad except says why on its line; one that only cleans up ends in a bare `raise`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "mlxkv", ROOT / "cli" / "mlxkv_cli")
LIMITS = {"module": 450, "class": 300, "function": 60}
BROAD = {"Exception", "BaseException"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORT = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    lines: list[str]

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """Every node, with the dotted name of the class or function it stands in."""
        return _inside(self.tree, self.name)

    def said(self, line: int, mark: str = "") -> str:
        """The comment on a line, from 1, that begins with a mark; without a lint rule's name in front."""
        comment = self.lines[line - 1].partition(f"# {mark}")[2].strip()
        return comment.partition(" - ")[2] if comment.startswith("noqa") else comment


def _inside(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        yield name, node
        yield from _inside(node, f"{name}.{node.name}" if isinstance(node, (*FUNCTION, ast.ClassDef)) else name)


def modules(package: Path) -> Iterator[Module]:
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        yield Module(name.removesuffix(".__init__"), ast.parse(text), text.splitlines())


def sizes(found: Sequence[Module]) -> dict[str, list[tuple[int, str, str]]]:
    """Modules, classes and functions, the longest first: lines, name, and why it is long where that is said."""
    each: dict[str, list[tuple[int, str, str]]] = {kind: [] for kind in LIMITS}
    for module in found:
        why = [line[len("# long:") :].strip() for line in module.lines if line.startswith("# long:")]
        each["module"].append((len(module.lines), module.name, " ".join(why)))
        for name, node in module.nodes():
            if isinstance(node, (*FUNCTION, ast.ClassDef)):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                lines = (node.end_lineno or 0) - node.lineno + 1
                each[kind].append((lines, f"{name}.{node.name}", module.said(node.lineno, "long:")))
    return {kind: sorted(some, reverse=True) for kind, some in each.items()}


def imported(tree: ast.AST, names: set[str]) -> set[str]:
    """The modules of `names` that a tree imports, late ones too, but none that only a type checker sees."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & names or {node.module or ""}
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            found |= imported(node, names)
    return found & names


def cycles(found: Sequence[Module]) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or not."""
    names = {module.name for module in found}
    reached = {module.name: imported(module.tree, names) for module in found}
    for via in names:
        for name in names:
            if via in reached[name]:
                reached[name] |= reached[via]
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in names}
    return sorted(group for group in groups if group)


def broad(found: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """The function of each except that takes every exception, and why it does."""
    for module in found:
        for name, node in module.nodes():
            if isinstance(node, ast.ExceptHandler):
                kind = node.type or ast.Name("BaseException")
                kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
                last = node.body[-1]
                again = "raised again" if isinstance(last, ast.Raise) and last.exc is None else ""
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                kinds, again = node.args, ""
            else:
                continue
            if BROAD & {ast.unparse(kind) for kind in kinds}:
                yield name, module.said(node.lineno) or again or "no reason given"


def late(found: Sequence[Module]) -> Counter[str]:
    """How many imports of each module wait for a function to be called."""
    count: Counter[str] = Counter()
    for module in found:
        functions = {f"{name}.{node.name}" for name, node in module.nodes() if isinstance(node, FUNCTION)}
        count[module.name] = sum(isinstance(node, IMPORT) and name in functions for name, node in module.nodes())
    return +count


def rows(found: Sequence[Module]) -> Iterator[tuple[str, object]]:
    each, circles, caught, lately = sizes(found), cycles(found), list(broad(found)), late(found)
    lines = [size for size, _, _ in each["module"]]
    yield "modules", f"{len(lines)} with {sum(lines):,} lines; median {median(lines):.0f}, most {max(lines):,}"
    for kind, most in LIMITS.items():
        for place, (size, name, why) in enumerate(each[kind]):
            if not place or size > most:
                figure = f"{kind} over {most} lines" if size > most else f"longest {kind}"
                yield figure, f"{size}: `{name}` {why}".strip()
    yield "import cycles", len(circles)
    yield from (("import cycle", ", ".join(f"`{name}`" for name in group)) for group in circles)
    yield "broad excepts", len(caught)
    yield from (("broad except", f"`{name}`: {why}") for name, why in caught)
    yield "late imports", f"{lately.total()} in {len(lately)} modules"
    yield from (("late imports of", f"`{name}`: {count}") for name, count in lately.items())


def main(packages: Sequence[Path]) -> None:
    found = [module for package in packages for module in modules(package)]
    print("| figure | value |\n|---|---|")
    for figure, value in rows(found):
        print(f"| {figure} | {value} |")


if __name__ == "__main__":
    main([Path(given) for given in sys.argv[1:]] or PACKAGES)
