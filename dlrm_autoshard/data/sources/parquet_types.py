"""Knows which parquet types can be ids and numbers, and reads them: equal values are equal, whatever their type.

kind_of_ids(pa.list_(pa.int32()))                 # "numbers"; "text" for strings, "nothing" for a file of nulls
lengths_of(array), values_of(array)               # ids of each row, and all of them one after another
hashed(values_of(array), rows=4000)               # 7, 7.0, Decimal(7) and "7" get one row
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrm_autoshard.data.errors import BadValue
from dlrm_autoshard.data.hashing import mix64

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["numbers", "text", "nothing"]

_NUMERAL = r"^(0|-?[1-9][0-9]{0,19})$"  # the normal form of whole numbers: "007" and "7.0" differ from "7"
_WIDEST_DECIMAL = 38


# -- types ------------------------------------------------------------------------------------------------------------


def _is(kind: pa.DataType, *names: str) -> bool:
    """Returns whether it is one of these types; older versions of pyarrow lack some."""
    import pyarrow.types as kinds

    return any(getattr(kinds, f"is_{name}")(kind) for name in names if hasattr(kinds, f"is_{name}"))


def _is_list(kind: pa.DataType) -> bool:
    return _is(kind, "list", "large_list", "fixed_size_list", "list_view", "large_list_view")


def is_number(kind: pa.DataType) -> bool:
    """Returns whether the type's values can be labels, dense features or weights."""
    kind = kind.value_type if _is(kind, "dictionary") else kind
    return _is(kind, "integer", "floating", "boolean", "decimal", "null")


def is_number_or_list(kind: pa.DataType) -> bool:
    """Returns whether values are numbers, or lists of numbers."""
    return is_number(kind.value_type if _is_list(kind) else kind)


def kind_of_ids(kind: pa.DataType) -> Kind | None:
    """Returns the kind of a column's ids, also in lists; None if the type cannot be ids."""
    kind = kind.value_type if _is_list(kind) else kind
    kind = kind.value_type if _is(kind, "dictionary") else kind
    if _is(kind, "null"):
        return "nothing"
    if is_number(kind):
        return "numbers"
    text = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
    return "text" if _is(kind, *text) else None


# -- values -----------------------------------------------------------------------------------------------------------


def numbers(array: pa.Array) -> NDArray[np.float32]:
    """Returns the column as float32, null as 0."""
    import pyarrow as pa

    floats = _plain(array).cast(pa.float32(), safe=False).fill_null(0)
    found: NDArray[np.float32] = floats.to_numpy(zero_copy_only=False)
    return found


def nan_as_null(array: pa.Array) -> pa.Array:
    """Replaces NaN by null, because pandas writes whole numbers with gaps as floats with NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = _plain(array)
    if not _is(array.type, "floating"):
        return array
    return pc.if_else(pc.fill_null(pc.is_nan(array), True), pa.scalar(None, array.type), array)


def lengths_of(array: pa.Array) -> NDArray[np.int32]:
    """Returns the number of values of each row: a list's length; 1 without lists; 0 for a null."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(array).fill_null(0) if _is_list(array.type) else array.is_valid()
    found: NDArray[np.int32] = lengths.to_numpy(zero_copy_only=False).astype(np.int32)
    return found


def values_of(array: pa.Array) -> pa.Array:
    """Returns the values of all rows, one after another. BadValue for a null inside a list."""
    if not _is_list(array.type):
        return _plain(array).drop_null()
    values = _plain(array.flatten())
    if values.null_count:
        place = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        raise BadValue(place, "null in a list. Leave it out of the list")
    return values


def _plain(array: pa.Array) -> pa.Array:
    """Converts dictionaries, views and narrow decimals to types that all of pyarrow's functions take."""
    import pyarrow as pa

    if _is(array.type, "dictionary"):
        array = array.dictionary_decode()
    if _is(array.type, "string_view", "binary_view"):
        array = array.cast(pa.large_binary())
    if _is(array.type, "decimal32", "decimal64"):
        array = array.cast(pa.decimal128(_WIDEST_DECIMAL, array.type.scale))
    return array


def whole_numbers(ids: pa.Array) -> NDArray[np.int64] | NDArray[np.uint64]:
    """Returns ids without nulls as int64, or uint64 if one needs it. BadValue for ids that are not whole numbers of 64
    bits, and for floats so large that neighbouring whole numbers coincide."""
    import pyarrow as pa

    if _is(ids.type, "null"):
        return np.zeros(0, np.int64)  # no value is there
    if _is(ids.type, "boolean"):
        ids = ids.cast(pa.int64())
    if _is(ids.type, "floating"):
        floats = ids.to_numpy(zero_copy_only=False)
        most = 2.0 ** (np.finfo(floats.dtype).nmant + 1)
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(floats) < most)  # includes NaN
            odd = wrong | (np.trunc(floats) != floats)
        if odd.any():
            place = int(odd.argmax())
            gaps = wrong[place] and np.isfinite(floats[place])
            why = f"from {most:,.0f} on, {ids.type} cannot tell all ids apart" if gaps else "ids are whole numbers"
            raise BadValue(place, f"{floats[place]!s}: {why}. Store the column as whole numbers, such as int64")
        return floats.astype(np.int64)
    if _is(ids.type, "decimal"):
        return _from_decimals(ids)
    found: NDArray[Any] = ids.to_numpy(zero_copy_only=False)
    wide = found.dtype == np.uint64 and len(found) and int(found.max()) >= 2**63
    return found if wide else found.astype(np.int64)


def _from_decimals(ids: pa.Array) -> NDArray[np.int64] | NDArray[np.uint64]:
    import pyarrow as pa

    for kind in (pa.int64(), pa.uint64()):
        try:
            found: NDArray[Any] = ids.cast(kind).to_numpy(zero_copy_only=False)
            return found
        except pa.ArrowInvalid:
            continue
    for place, value in enumerate(ids.to_pylist()):
        if value != int(value):
            raise BadValue(place, f"{value}: ids are whole numbers. Store the column as such, or as text")
        if not -(2**63) <= value < 2**64:
            raise BadValue(place, f"{value}: ids have at most 64 bits. Store the column as text, which is hashed")
    raise BadValue(0, "below 0 while others are 2^63 and more. Store the column as text, which is hashed")


def hashed(ids: pa.Array, rows: int) -> NDArray[np.int64]:
    """Returns a row for each id: the same for equal values, whatever their type or file."""
    keys_N = _keys_of_text(ids) if kind_of_ids(ids.type) == "text" else mix64(whole_numbers(ids).astype(np.uint64))
    return (keys_N % np.uint64(rows)).astype(np.int64)


def _keys_of_text(text: pa.Array) -> NDArray[np.uint64]:
    """Returns 64-bit hashes of the texts: of the number if the text is a whole number in normal form, else of the
    bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = text.cast(pa.large_binary()).dictionary_encode()
    words = encoded.dictionary.to_pylist()
    keys = np.array([xxhash.xxh3_64_intdigest(word) for word in words], np.uint64)
    numerals = np.flatnonzero(pc.match_substring_regex(encoded.dictionary, _NUMERAL).to_numpy(zero_copy_only=False))
    values = {place: value for place in numerals if -(2**63) <= (value := int(words[place])) < 2**64}
    places = np.fromiter(values.keys(), np.int64, len(values))
    keys[places] = mix64(np.fromiter((value % 2**64 for value in values.values()), np.uint64, len(values)))
    keys_N: NDArray[np.uint64] = keys[encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)]
    return keys_N
