"""What of a workbook's XML the library that reads it leaves out, rewritten so that it does not.

Formulas whose result the file does not hold become texts, NO_RESULT; so do, in Excel's files, whole numbers that their
format fills up with zeros (00501); in OpenDocument, tabs, line breaks and
durations from 24 hours on. And there, which cells are merged downwards.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from html import unescape
from xml.sax.saxutils import escape

from worker.training.rows.row import NO_RESULT_CELL

_DAMAGED = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, zlib.error, UnicodeError)
_ATTRIBUTES = rb"""(?:[^<>"']|"[^"]*"|'[^']*')*"""
_EXCEL_SHEET = re.compile(r"xl/worksheets/[^/]+\.xml", re.IGNORECASE)
_CALCULATES = re.compile(rb'fullCalcOnLoad="(?:1|true)"')
_HAS_FORMULAS = re.compile(rb"<(?:\w+:)?f[\s/>]")
_FORMULA = re.compile(
    rb"<((?:\w+:)?)c\b(%(a)s)>(\s*<\1f\b%(a)s(?<!/)>[^<]*</\1f>|\s*<\1f\b%(a)s/>)\s*"
    rb"(?:<\1v\s*/>\s*|<\1v>([^<]*)</\1v>\s*)?</\1c>" % {b"a": _ATTRIBUTES}
)
_PLAIN = re.compile(
    rb"<((?:\w+:)?)c\b(%(a)s)>(\s*(?:<\1f\b%(a)s(?:(?<=/)>|>[^<]*</\1f>)\s*)?)<\1v>(\d+)</\1v>\s*</\1c>"
    % {b"a": _ATTRIBUTES}
)
"""A cell with a whole number, with its formula if it has one."""
_STYLE = re.compile(rb"""\bs=["'](\d+)["']""")
_FORMAT = re.compile(rb"<(?:\w+:)?numFmt\b(%b)>" % _ATTRIBUTES)
_FORMAT_ID, _FORMAT_CODE = (
    re.compile(rb"""numFmtId=["'](\d+)["']"""),
    re.compile(rb"""formatCode=(?:"([^"]*)"|'([^']*)')"""),
)
_STYLES = re.compile(rb"<(?:\w+:)?cellXfs\b.*?</(?:\w+:)?cellXfs>", re.DOTALL)
_STYLE_XF = re.compile(rb"<(?:\w+:)?xf\b(%b)>" % _ATTRIBUTES)
_ZEROS = re.compile(r'(?:\[\$-[0-9A-Fa-f]+\])?((?:"[^"]*"|\\.)*)(0+)')
"""A format of a text that stays, and zeros alone."""
_WITH_TYPE = re.compile(rb"""\bt=["'](?!n["'])""")
_OPEN_CELL = re.compile(
    rb"<table:table-cell\b(%(a)s)(?:(?<=/)>|>\s*</table:table-cell>)" % {b"a": _ATTRIBUTES},
)
_DURATION = re.compile(rb'office:value-type="time"(\s+)office:time-value="PT(\d+)H(\d\d)M(\d\d)(?:[.,](\d+))?S"')
_SPACES = {b"tab": b"\t", b"line-break": b"\n"}
_SPACE = re.compile(rb"<text:(tab|line-break)\b%(a)s/>" % {b"a": _ATTRIBUTES})
_DAY_H = 24
_PLACE = re.compile(rb"<table:(table|table-row|table-cell|covered-table-cell)\b(?!-)(%(a)s)>" % {b"a": _ATTRIBUTES})
_NUMBER = re.compile(rb"table:number-(rows|columns)-(repeated|spanned)=[\"'](\d+)")
_NAME = re.compile(rb"""table:name=(?:"([^"]*)"|'([^']*)')""")

Range = tuple[tuple[int, int], tuple[int, int]]
"""Row and column of the first and the last of cells that are merged."""


def merged_in(content: bytes) -> dict[str, list[Range]]:
    """By sheet of an OpenDocument file, the cells that are merged over several rows."""
    found: dict[str, list[Range]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as book:
            document = book.read("content.xml") if "content.xml" in book.namelist() else b""
    except _DAMAGED:
        return found
    if b"number-rows-spanned" not in document:
        return found
    ranges: list[Range] = []
    row = next_row = column = 0
    for place in _PLACE.finditer(document):
        kind, attributes = place[1], place[2]
        numbers = {(each[1], each[2]): int(each[3]) for each in _NUMBER.finditer(attributes)}
        if kind == b"table":
            named = _NAME.search(attributes)
            name = unescape((named[1] or named[2] or b"").decode("utf-8", "replace")) if named else ""
            ranges, next_row = found.setdefault(name, []), 0
        elif kind == b"table-row":
            row, column = next_row, 0
            next_row += numbers.get((b"rows", b"repeated"), 1)
        else:
            last = row + numbers.get((b"rows", b"spanned"), 1) - 1
            if last > row:
                ranges.append(((row, column), (last, column + numbers.get((b"columns", b"spanned"), 1) - 1)))
            column += numbers.get((b"columns", b"repeated"), 1)
    return found


def completed(content: bytes) -> bytes:
    """The workbook, with what would be left out; the same where there is nothing of that, or it is damaged."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as book:
            names = book.namelist()
            calculates = "xl/workbook.xml" in names and _CALCULATES.search(book.read("xl/workbook.xml")) is not None
            padded = _padded(book.read("xl/styles.xml")) if "xl/styles.xml" in names else {}
            parts = {}
            for name in names:
                if name == "content.xml":
                    before = book.read(name)
                    after = _open_document(before)
                elif _EXCEL_SHEET.fullmatch(name):
                    before = book.read(name)
                    after = _excel(before, calculates=calculates)
                    after = _with_zeros(after, padded) if padded else after
                else:
                    continue
                if after is not before:
                    parts[name] = after
            if not parts:
                return content
            to = io.BytesIO()
            with zipfile.ZipFile(to, "w") as written:
                for name in names:
                    written.writestr(name, parts[name] if name in parts else book.read(name))
            return to.getvalue()
    except _DAMAGED:
        return content  # the library says what is wrong


def _excel(sheet: bytes, *, calculates: bool) -> bytes:
    """`calculates`: the program that opens it is told to compute all formulas. Libraries that cannot write 0 for each
    then."""
    if not _HAS_FORMULAS.search(sheet):
        return sheet
    none: set[bytes | None] = {None, b""}
    if calculates and all(found[4] in (*none, b"0") for found in _FORMULA.finditer(sheet)):
        none.add(b"0")

    def marked(found: re.Match[bytes]) -> bytes:
        prefix, attributes, formula, value = found.groups()
        if value not in none or _WITH_TYPE.search(attributes):
            return found[0]
        plain = re.sub(rb"""\s+t=["']n["']""", b"", attributes)
        return b'<%bc%b t="str">%b<%bv>%b</%bv></%bc>' % (
            prefix, plain, formula, prefix, NO_RESULT_CELL.encode(), prefix, prefix,
        )  # fmt: skip

    after = _FORMULA.sub(marked, sheet)
    return sheet if after == sheet else after


def _padded(styles: bytes) -> dict[bytes, tuple[str, int]]:
    """By number of a style that fills whole numbers up with zeros: what stands before them, and how many digits."""
    formats = {}
    for each in _FORMAT.finditer(styles):
        number, code = _FORMAT_ID.search(each[1]), _FORMAT_CODE.search(each[1])
        if number and code and (zeros := _ZEROS.fullmatch(unescape((code[1] or code[2] or b"").decode()))):
            before = re.sub(r'"([^"]*)"|\\(.)', lambda part: part[1] or part[2] or "", zeros[1])
            if before or len(zeros[2]) > 1:
                formats[number[1]] = before, len(zeros[2])
    block = _STYLES.search(styles)
    used = [_FORMAT_ID.search(each[1]) for each in _STYLE_XF.finditer(block[0] if block else b"")]
    return {b"%d" % style: formats[one[1]] for style, one in enumerate(used) if one and one[1] in formats}


def _with_zeros(sheet: bytes, padded: Mapping[bytes, tuple[str, int]]) -> bytes:
    """The sheet with the numbers of these styles as texts, as they are shown."""

    def shown(found: re.Match[bytes]) -> bytes:
        prefix, attributes, formula, value = found.groups()
        style = _STYLE.search(attributes)
        if style is None or style[1] not in padded or _WITH_TYPE.search(attributes):
            return found[0]
        before, digits = padded[style[1]]
        plain = re.sub(rb"""\s+t=["']n["']""", b"", attributes)
        text = escape(before).encode() + value.zfill(digits)
        return b'<%bc%b t="str">%b<%bv>%b</%bv></%bc>' % (prefix, plain, formula, prefix, text, prefix, prefix)

    after = _PLAIN.sub(shown, sheet)
    return sheet if after == sheet else after


def _open_document(content: bytes) -> bytes:
    def marked(found: re.Match[bytes]) -> bytes:
        attributes = found[1].removesuffix(b"/")
        if b"table:formula=" not in attributes or b"office:value-type=" in attributes:
            return found[0]
        text = NO_RESULT_CELL.encode()
        return b'<table:table-cell%b office:value-type="string"><text:p>%b</text:p></table:table-cell>' % (
            attributes, text,
        )  # fmt: skip

    def shown(found: re.Match[bytes]) -> bytes:
        if int(found[2]) < _DAY_H:
            return found[0]
        part = (found[5] or b"").rstrip(b"0")
        value = b"%d:%b:%b%b" % (int(found[2]), found[3], found[4], b"." + part if part else b"")
        return b'office:value-type="string"%boffice:string-value="%b"' % (found[1], value)

    after = _SPACE.sub(lambda found: _SPACES[found[1]], content)
    after = _DURATION.sub(shown, _OPEN_CELL.sub(marked, after))
    return content if after == content else after
