"""Messages from bytes, by any thread.

msgspec works out what a type is when it is first decoded. A thread that decodes the type meanwhile finds it half done,
and the process ends with a segmentation fault. So the decoders are made here, one at a time.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Body = TypeVar("Body")

_making = threading.Lock()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode(data: Any, body_type: type[Body]) -> Body:
    """Raises what msgspec raises."""
    decoder = _decoders.get(body_type)
    if decoder is None:
        with _making:
            decoder = _decoders.setdefault(body_type, msgspec.msgpack.Decoder(body_type))
    found: Body = decoder.decode(data)
    return found
