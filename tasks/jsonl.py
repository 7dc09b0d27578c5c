"""Reads rows of problems from files and checks them, those from the hub too, one by one."""

import json
import os
import re

from common import UsageError, require
from common.grading import RULES


def read_jsonl(path: str, fields: tuple[str, ...], others: tuple[str, ...] = ()) -> list[dict]:
    """Objects with non-empty strings in these `fields`, and their place "file:line" as `where`. The
    `others` may be missing, null or empty; else they are strings too.

    A BOM, CRLF and blank lines are fine; U+2028 in a string ends no line (str.splitlines would).
    """
    hint = " (--eval-every 0 skips evaluation)" if path.endswith("validation.jsonl") else ""
    require(os.path.isfile(path), f"{path}: no such file{hint}")
    rows: list[dict] = []
    places: dict[str, str] = {}  # id -> where
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{where}: not JSON ({error})") from None
                rows.append(check_row(row, fields, others, where))
                name = row.get("unique_id", row.get("id"))
                if name not in (None, "") and name == name:  # NaN, as exports have it, is no id
                    first = places.setdefault(str(name), where)
                    require(first == where, f"{where}: the id {name!r:.60} is also in {first}")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 ({error})") from None
    require(rows, f"{path}: is empty; it needs one JSON object per line")
    return rows


def read_parquet(path: str, fields: tuple[str, ...], others: tuple[str, ...] = ()) -> list[dict]:
    """The same for a Parquet file; a row's place is "file:number"."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path}: not Parquet ({' '.join(str(error).split())[:200]})") from None
    require(rows, f"{path}: is empty")
    return [check_row(row, fields, others, f"{path}:{i}") for i, row in enumerate(rows, 1)]


def check_row(row: object, fields: tuple[str, ...], others: tuple[str, ...], where: str) -> dict:
    """The row with `where`; raises UsageError where its fields are not as `read_jsonl` says."""
    require(
        isinstance(row, dict), f"{where}: a line must be a JSON object, found {type(row).__name__}"
    )
    given = [field for field in others if row.get(field) not in (None, "")]
    for field in (*fields, *given):
        value = row.get(field)
        require(
            isinstance(value, str) and value.strip(),
            f'{where}: "{field}" must be a non-empty string, found {value!r:.60}',
        )
        require(
            not re.search("[\ud800-\udfff]", value),
            f'{where}: "{field}" has half of a character (a lone surrogate): remove it',
        )
    return {**row, "where": where}


def check_answer(rule: str, answer: str, where: str) -> None:
    """Raises UsageError for an answer that no response could match."""
    what = {"####": "a plain number", "boxed": "an answer"}[rule]
    is_other_kind = rule == "boxed" and "####" in answer
    hint = "has ####: leave out --grading-rule boxed"
    require(not is_other_kind, f"{where}: the answer {answer!r:.60} {hint}")
    require(
        RULES[rule].is_gradable(answer),
        f"{where}: the answer {answer!r:.60} is not {what}, so no response could match it",
    )
