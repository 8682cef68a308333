"""Training state as JSON and tensors, without pickle.

    document, tensors = flatten({"optimizer": optimizer.state_dict(), "seed": 7})
    tree = unflatten(document, tensors)

A tree is made of dict, list, tuple, set and frozenset, and of None, bool, int, float, complex, str, bytes, torch
tensors, `torch.Size`, `torch.dtype`, `torch.device`, numpy arrays and numpy scalars. Keys of a dict and members of a
set are plain values or tuples of them.

Promises:
- It comes back exactly: tuples stay tuples, keys keep their type, every bit of a float is kept. Exceptions: an
  OrderedDict, defaultdict or Counter comes back as a dict; tensors come back as contiguous CPU tensors without
  gradient, arrays in C order.
- One tensor that occurs twice (the same object, or the same memory seen through the same shape and strides) is kept
  once and comes back as one object. Other overlapping views come back as copies.
- Everything else is a `TypeError` that names the place and the remedy; nothing is left out silently.
- `flatten` copies nothing that is contiguous: its tensors are the live ones.
- No document, however made, runs code or takes more than memory in proportion to its own size; one that is not ours is
  a `ValueError`.

The document: JSON scalars and lists are themselves; everything else is an object with one key, its kind.
"""

from __future__ import annotations

import base64
import collections
import enum
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from paceline.checkpoint import tensorfile

MAX_DEPTH = 100
_INT64 = 1 << 63
_PLAIN = "None, bool, int, float, str, or tuples of these"
_TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Kinds of numpy types whose bytes are their value. An object array's are pointers: never from a file.
_NUMPY_TYPE = re.compile(r"[<>|][biufcSUmM][1-9][0-9]{0,8}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


def flatten(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The document of a tree, and its tensors by the name that the document gives them."""
    flattener = Flattener()
    document = flattener.add(tree)
    return document, flattener.tensors


def unflatten(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    try:
        return _Reader(tensors).read(document, 0)
    except NotOurs:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise NotOurs(f"the document cannot be read: {error}; it was not written by Paceline") from error


class NotOurs(ValueError):
    """A document that Paceline did not write."""


# -- to a document ---------------------------------------------------------------------------------------------------


class Ties:
    """Tells which tensors are one: it gives each the name under which it was first seen."""

    def __init__(self) -> None:
        # By address; they are kept alive here, so that no later one gets the address of an earlier.
        self._seen: dict[int, list[tuple[torch.Tensor, str]]] = {}

    def first_name(self, tensor: torch.Tensor, name: str) -> str:
        there = self._seen.setdefault(tensor.data_ptr(), [])
        for other, its_name in there:
            if other is tensor or _is_same_view(other, tensor):
                return its_name
        there.append((tensor, name))
        return name


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """For two with the same address. An empty tensor has none that would tell it from another."""
    return (
        one.numel() > 0
        and (one.dtype, one.shape, one.stride(), one.device) == (other.dtype, other.shape, other.stride(), other.device)
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


class Flattener:
    """Makes documents of several trees over one set of tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._ties = Ties()

    def add(self, tree: Any, path: str = "") -> Any:
        """The tree's document; `path` is where its errors and tensor names begin."""
        return self._encode(tree, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _AS_IS:
            return value
        if depth > MAX_DEPTH:
            raise ValueError(f"{path[:80]}…: nested deeper than {MAX_DEPTH}; does it hold itself?")
        if kind is list:
            return [self._encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if kind in _DICTS:
            return self._encode_dict(value, path, depth)
        if kind is tuple:
            return {"tuple": [self._encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._keep(value, path)}
        if kind is np.ndarray:
            return {"array": self._encode_array(value, path)}
        if kind is set or kind is frozenset:
            # Sorted, so that equal states make equal documents.
            members = sorted((_encode_plain(item, f"a member of {_say(path)}", depth + 1) for item in value), key=repr)
            return {kind.__name__: members}
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return {"scalar": [_numpy_type(array.dtype, path), base64.b64encode(array.tobytes()).decode()]}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype:
            return {"dtype": str(value)}
        if kind is torch.device:
            return {"device": str(value)}
        return _encode_plain(value, path, depth)

    def _encode_dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str for key in value):
            begin = f"{path}." if path else ""
            return {"map": {key: self._encode(item, f"{begin}{key}", depth + 1) for key, item in value.items()}}
        pairs = []
        for key, item in value.items():
            encoded = _encode_plain(key, f"the key {key!r} of {_say(path)}", depth + 1)
            pairs.append([encoded, self._encode(item, f"{path}[{key!r}]", depth + 1)])
        return {"dict": pairs}

    def _encode_array(self, array: np.ndarray[Any, Any], path: str) -> list[Any]:
        described = _numpy_type(array.dtype, path)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not raw.flags.writeable:
            raw = raw.copy()  # torch has no tensors that cannot be written
        return [self._keep(torch.from_numpy(raw), path), described, list(array.shape)]

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        problem = tensorfile.why_not(tensor)
        if problem:
            raise TypeError(f"{_say(path)}: {problem}")
        name, count = path, 1
        while name in self.tensors or name == tensorfile.RESERVED:
            count += 1
            name = f"{path}#{count}"
        kept = self._ties.first_name(tensor, name)
        if kept == name:
            self.tensors[name] = tensor
        return kept


_AS_IS = frozenset({type(None), bool, str})
_DICTS = frozenset({dict, collections.OrderedDict, collections.defaultdict, collections.Counter})


def _encode_plain(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"int": hex(value)}
    if kind is float:
        return _encode_float(value)
    if kind is complex:
        return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is tuple:
        if depth > MAX_DEPTH:
            raise ValueError(f"{path[:80]}…: nested deeper than {MAX_DEPTH}")
        return {"tuple": [_encode_plain(item, path, depth + 1) for item in value]}
    raise TypeError(f"{_say(path)}: {_refusal(value)}")


def _encode_float(value: float) -> Any:
    # JSON has no word for these.
    return value if math.isfinite(value) else {"float": repr(value)}


def _numpy_type(dtype: np.dtype[Any], path: str) -> str:
    if not _NUMPY_TYPE.fullmatch(dtype.str) or dtype.names is not None:
        raise TypeError(
            f"{_say(path)}: numpy values of type {dtype} cannot be saved; convert to numbers, strings or lists"
        )
    return dtype.str


def _say(path: str) -> str:
    return path or "the state"


def _refusal(value: Any) -> str:
    name = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return f"a member of the enum {name} cannot be saved; save its .name or .value"
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return f"a {name} cannot be a key or a member of a set; use {_PLAIN}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"a named tuple ({name}) cannot be saved; save tuple(...) or ._asdict() of it"
    if isinstance(value, (dict, list, set, frozenset)) and type(value) in (dict, list, set, frozenset):
        return f"a {name} cannot be a key or a member of a set; use {_PLAIN}"
    if hasattr(value, "state_dict"):
        return f"a {name} cannot be saved; save its state_dict()"
    if callable(value):
        what = "a function" if hasattr(value, "__code__") else f"a callable ({name})"
        return f"{what} cannot be saved; leave it out and make it again after loading"
    return (
        f"a {name} cannot be saved; turn it into numbers, strings, lists, dicts and tensors, and build it again after "
        "loading"
    )


# -- from a document -------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "map": lambda body, depth: {_text(key): self.read(item, depth + 1) for key, item in body.items()},
            "dict": lambda body, depth: {
                _read_plain(key, depth + 1): self.read(item, depth + 1) for key, item in _list(body)
            },
            "tuple": lambda body, depth: tuple(self.read(item, depth + 1) for item in _list(body)),
            "set": lambda body, depth: {_read_plain(item, depth + 1) for item in _list(body)},
            "frozenset": lambda body, depth: frozenset(_read_plain(item, depth + 1) for item in _list(body)),
            "tensor": lambda body, _: self._tensor(body),
            "array": lambda body, _: self._array(*_list(body)),
            "scalar": lambda body, _: _scalar(*_list(body)),
            "size": lambda body, _: torch.Size([_int(length) for length in _list(body)]),
            "dtype": lambda body, _: _TORCH_DTYPES[_text(body)],
            "device": lambda body, _: torch.device(_text(body)),
        }

    def read(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH + 2:  # a tuple as a key may begin at the limit
            raise NotOurs(f"the document is nested deeper than {MAX_DEPTH}; it was not written by Paceline")
        if type(node) is list:
            return [self.read(item, depth + 1) for item in node]
        if type(node) is dict and len(node) == 1:
            ((kind, body),) = node.items()
            if kind in self._kinds:
                return self._kinds[kind](body, depth)
        return _read_plain(node, depth)

    def _tensor(self, name: Any) -> torch.Tensor:
        tensor = self._tensors.get(_text(name))
        if tensor is None:
            raise NotOurs(f"the document names a tensor {name!r} that is not there")
        return tensor

    def _array(self, name: Any, described: Any, shape: Any) -> np.ndarray[Any, Any]:
        raw = self._tensor(name)
        if raw.dtype is not torch.uint8 or raw.dim() != 1:
            raise NotOurs(f"the document takes the tensor {name!r} for an array, which it is not")
        found: np.ndarray[Any, Any] = raw.numpy().view(_read_numpy_type(described))
        return found.reshape([_int(length) for length in _list(shape)])


def _read_plain(node: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 2:
        raise NotOurs(f"the document is nested deeper than {MAX_DEPTH}; it was not written by Paceline")
    if node is None or type(node) in (bool, int, float, str):
        return node
    if type(node) is dict and len(node) == 1:
        ((kind, body),) = node.items()
        if kind == "int":
            return int(_text(body), 16)
        if kind == "float" and body in ("inf", "-inf", "nan"):
            return float(body)
        if kind == "bytes":
            return base64.b64decode(_text(body), validate=True)
        if kind == "complex" and type(body) is list and len(body) == 2:
            return complex(_float(body[0]), _float(body[1]))
        if kind == "tuple":
            return tuple(_read_plain(item, depth + 1) for item in _list(body))
    raise NotOurs(f"the document holds {str(node)[:80]!r}, which Paceline does not write")


def _scalar(described: Any, encoded: Any) -> Any:
    raw = base64.b64decode(_text(encoded), validate=True)
    return np.frombuffer(raw, dtype=_read_numpy_type(described)).reshape(())[()]


def _read_numpy_type(described: Any) -> np.dtype[Any]:
    if not _NUMPY_TYPE.fullmatch(_text(described)):
        raise NotOurs(f"the document names a numpy type {described!r} that Paceline does not write")
    found: np.dtype[Any] = np.dtype(described)
    return found


def _float(node: Any) -> float:
    value = _read_plain(node, 0)
    if type(value) is not float:
        raise NotOurs(f"the document holds {value!r} where a float was expected")
    return value


def _text(node: Any) -> str:
    if type(node) is not str:
        raise NotOurs(f"the document holds {type(node).__name__} where a text was expected")
    return node


def _int(node: Any) -> int:
    if type(node) is not int or not 0 <= node < _INT64:
        raise NotOurs(f"the document holds {str(node)[:80]!r} where a length was expected")
    return node


def _list(node: Any) -> list[Any]:
    if type(node) is not list:
        raise NotOurs(f"the document holds {type(node).__name__} where a list was expected")
    return node
