"""Workbooks as bytes, made with nothing but zipfile."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_DOCUMENT = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_STYLES = (
    f'<styleSheet xmlns="{_MAIN}"><numFmts count="3"><numFmt numFmtId="164" formatCode="00000"/>'
    '<numFmt numFmtId="165" formatCode="&quot;A&amp;B-&quot;000"/><numFmt numFmtId="166" formatCode="0.00"/></numFmts>'
    '<cellStyleXfs count="1"><xf numFmtId="164"/></cellStyleXfs>'
    '<cellXfs count="7"><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="22"/>'
    '<xf numFmtId="46"/><xf numFmtId="164"/><xf numFmtId="165"><alignment/></xf><xf numFmtId="166"/></cellXfs>'
    "</styleSheet>"
)
DATE, TIME, DURATION, ZEROS, NAMED_ZEROS, DECIMALS = range(1, 7)
"""Styles of a number."""


def zipped(files: Mapping[str, str | bytes]) -> bytes:
    """A zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def cell(place: str, value: object, style: int = 0) -> str:
    """One cell, such as `B3`, as XML."""
    match value:
        case str():
            return f'<c r="{place}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
        case bool():
            return f'<c r="{place}" t="b"><v>{value:d}</v></c>'
    return f'<c r="{place}" s="{style}"><v>{value}</v></c>'


def cells_of(rows: Sequence[Sequence[object]], first: int = 1) -> str:
    """Rows from column A and row `first` on, as XML; None: no cell."""
    return "".join(
        f'<row r="{number}">'
        + "".join(cell(f"{chr(65 + place)}{number}", value) for place, value in enumerate(row) if value is not None)
        + "</row>"
        for number, row in enumerate(rows, start=first)
    )


def xlsx(sheets: Mapping[str, str], *, hidden: Sequence[str] = (), behind: str = "", settings: str = "") -> bytes:
    """A workbook whose sheets hold these cells (XML); `behind`: XML behind the cells of each; `settings`: behind the
    list of sheets."""
    numbered, states = list(enumerate(sheets.items(), start=1)), ("visible", "hidden")
    named = "".join(
        f'<sheet name="{name}" sheetId="{number}" r:id="r{number}" state="{states[name in hidden]}"/>'
        for number, (name, _) in numbered
    )
    related = "".join(
        f'<Relationship Id="r{number}" Type="{_DOCUMENT}/worksheet" Target="worksheets/sheet{number}.xml"/>'
        for number, _ in numbered
    )
    related += f'<Relationship Id="s" Type="{_DOCUMENT}/styles" Target="styles.xml"/>'
    relations = f'<Relationships xmlns="{_PACKAGE}/relationships">%s</Relationships>'
    files = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"/>',
        "_rels/.rels": relations % f'<Relationship Id="b" Type="{_DOCUMENT}/officeDocument" Target="xl/workbook.xml"/>',
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_DOCUMENT}"><sheets>{named}</sheets>{settings}'
        "</workbook>",
        "xl/_rels/workbook.xml.rels": relations % related,
        "xl/styles.xml": _STYLES,
    }
    for number, (_, cells) in numbered:
        sheet = f'<worksheet xmlns="{_MAIN}"><sheetData>{cells}</sheetData>{behind}</worksheet>'
        files[f"xl/worksheets/sheet{number}.xml"] = sheet
    return zipped(files)


def ods(name: str, rows: Sequence[Sequence[str]]) -> bytes:
    """An OpenDocument sheet of texts; a cell that begins with `<` is XML."""
    office, table, text = (f"urn:oasis:names:tc:opendocument:xmlns:{part}:1.0" for part in ("office", "table", "text"))
    lines = "".join(
        "<table:table-row>"
        + "".join(
            value
            if value.startswith("<")
            else f'<table:table-cell office:value-type="string"><text:p>{escape(value)}</text:p></table:table-cell>'
            for value in row
        )
        + "</table:table-row>"
        for row in rows
    )
    content = (
        f'<office:document-content xmlns:office="{office}" xmlns:table="{table}" xmlns:text="{text}"><office:body>'
        f'<office:spreadsheet><table:table table:name="{escape(name)}">{lines}</table:table></office:spreadsheet>'
        "</office:body></office:document-content>"
    )
    kind = "application/vnd.oasis.opendocument.spreadsheet"
    manifest = '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"/>'
    return zipped({"mimetype": kind, "content.xml": content, "META-INF/manifest.xml": manifest})
