"""Prevents reasoning-gym's scorers from executing model output.

Several of them pass an answer to `eval`, or to sympy's `parse_expr`, which evaluates it as Python. In their modules
these names are rebound to functions that accept literals, arithmetic and formulas, and reject everything else.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import operator
import sys
import tokenize
import types
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 10_000  # characters of an answer
MAX_BITS = 4096  # of an intermediate integer
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert}
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "asinh", "acosh",
     "atanh", "exp", "log", "ln", "sqrt", "cbrt", "Abs", "abs", "sign", "erf", "gamma", "factorial", "Rational"]
)  # fmt: skip
_OPERATORS = frozenset(["+", "-", "*", "/", "//", "%", "**", "^", "(", ")", ",", "!"])
_LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT)


def evaluate_literal(text: str, *_: Any) -> Any:
    """Safe `eval` for literals and arithmetic on numbers.

    Raises: ValueError for anything else, and for numbers of more than MAX_BITS; SyntaxError.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](map(_value, node.elts))
    if isinstance(node, ast.Dict) and None not in node.keys:
        return dict(zip(map(_value, node.keys), map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_number(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.LShift) and right > MAX_BITS:
            raise ValueError("the number would be too large")
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and abs(right) * left.bit_length() > MAX_BITS:
            raise ValueError("the number would be too large")
        return _BINARY[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} is not a literal")


def _number(node: ast.expr) -> int | float:
    value = _value(node)
    if not isinstance(value, (int, float)) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ValueError("not a number, or too large")
    return value


def parse_formula(text: str, *arguments: Any, **options: Any) -> Any:
    """Safe version of sympy's parse_expr for numbers, symbols, operators, and calls of elementary functions.

    Raises: ValueError for anything else; exceptions of sympy.
    """
    from sympy.parsing.sympy_parser import parse_expr

    _check_formula(text)
    return parse_expr(text, *arguments, **options)


def _check_formula(text: str) -> None:
    if len(text) > MAX_CHARACTERS or not text.isascii():
        raise ValueError("too long, or not ASCII")
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(text.strip()).readline) if t.type not in _LAYOUT]
    except (tokenize.TokenError, SyntaxError) as error:
        raise ValueError(f"not a formula ({error})") from error
    previous = None
    for token in tokens:
        word = token.string
        if token.type == tokenize.NAME:
            if word.startswith("_") or "__" in word or keyword.iskeyword(word):
                raise ValueError(f"{word} is not a symbol")
            if word in vars(builtins) and word not in _FUNCTIONS:
                raise ValueError(f"{word} is a Python builtin")
        elif token.type != tokenize.NUMBER and word not in _OPERATORS and word.strip():
            raise ValueError(f"{word!r} is not allowed in a formula")
        is_call = word == "(" and previous is not None and previous.string not in _OPERATORS - {")"}
        if is_call and previous.string not in _FUNCTIONS:
            raise ValueError(f"{previous.string} is called, but is not an elementary function")
        previous = token if word.strip() else previous


class _GuardedSympy(types.ModuleType):
    """sympy with its parser replaced."""

    parse_expr = staticmethod(parse_formula)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["sympy"], name)


def guard_scorers() -> None:
    """Rebind `eval` and sympy's parser to the safe versions in every loaded module of reasoning-gym."""
    sympy = sys.modules.get("sympy")
    guarded = _GuardedSympy("sympy")
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("reasoning_gym.") or module is None:
            continue
        module.eval = evaluate_literal
        for name, value in list(vars(module).items()):
            if sympy is not None and value is sympy:
                setattr(module, name, guarded)
            elif sympy is not None and value is sympy.parse_expr:
                setattr(module, name, parse_formula)
