"""The mutations of one source file: each replaces one span of its text.

A statement may go (a call or an assignment for its effect), a comparison may move by one, a condition may be
negated, `and` and `or` may swap, an arithmetic operator, a number or a boolean may change. Logging, messages
and annotations stay: no test is meant to hold them. Not here: applying a mutation, or running tests.

mutmut 3 selects mutants by a variable inside the process under test, and cosmic-ray 8 has no operator that
removes a statement: most of this product's tests run in other processes (ranks under torchrun, Slurm, Ray),
and a removed fsync is a statement.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
SPOKEN = ("log", "logger", "logging", "print", "warnings", "typing", "cast")


@dataclass(frozen=True)
class Mutation:
    """Replaces text[start:end] of a file, offsets in UTF-8 bytes."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line} {self.kind}: {before[:70]} → {after[:40]}"

    def apply(self, text: str) -> str:
        raw = text.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()


def mutations(file: str, text: str) -> list[Mutation]:
    finder = _Finder(file, text)
    finder.visit(ast.parse(text))
    return sorted(set(finder.found), key=lambda one: (one.start, one.end, one.kind))


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.raw = text.encode()
        self.lines = [0]
        for line in self.raw.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.found: list[Mutation] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_spoken(node.value):
            self._add("call removed", node, "pass")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages stay."""

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("update removed", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("assignment removed", node, "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not _is_spoken(node):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """zip's strict=True asserts what the lines before it have made sure of."""
        if node.arg != "strict":
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages stay."""

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            self._between("comparison", left, right, COMPARISONS[type(node.ops[0])])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and, or", left, right, "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not _is_text(node):
            self._between("arithmetic", node.left, node.right, ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))

    def _negate(self, test: ast.expr) -> None:
        self._add("condition negated", test, f"(not ({self._text(test)}))")

    def _between(self, kind: str, left: ast.expr, right: ast.expr, operator: str) -> None:
        """Replaces the operator between two operands; parentheses around either stay."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.raw[start:end].decode()
        inner = gap.strip("() \t\n\\")
        if "#" in gap or not inner:
            return
        at = start + len(gap[: gap.index(inner)].encode())
        self._record(kind, left.end_lineno or 0, at, at + len(inner.encode()), operator)

    def _add(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        self._record(kind, node.lineno, *self._span(node), after)

    def _record(self, kind: str, line: int, start: int, end: int, after: str) -> None:
        before = self.raw[start:end].decode()
        self.found.append(Mutation(self.file, line, kind, start, end, before, after))

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.raw[start:end].decode()

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset


def _is_spoken(call: ast.Call) -> bool:
    return any(isinstance(one, ast.Name) and one.id in SPOKEN for one in ast.walk(call.func))


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is a text or its format."""
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in (node.left, node.right)
    )
