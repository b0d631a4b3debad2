# SPDX-License-Identifier: Apache-2.0
"""The series and the headers of patches: what is read, and which errors are named."""

import re

import pytest
from packaging.version import Version

from tests.unit.patching_helpers import ANSWERS, HEADERS, diff_of, patch_text, write_patches
from vllm_arm.patching.diff import PatchError
from vllm_arm.patching.series import load_patch, read_series

DIFF = diff_of(ANSWERS)


def load(tmp_path, text):
    file = tmp_path / "0001-x.patch"
    file.write_text(text)
    return load_patch(file)


def test_a_patch_has_its_headers_and_files(tmp_path):
    headers = HEADERS | {"Description": "say overlay\n and explain\n .\n at length"}
    patch = load(tmp_path, "SPDX-License-Identifier: Apache-2.0\n" + patch_text(DIFF, headers))
    assert patch.name == "0001-x.patch"
    assert patch.description == "say overlay"
    assert patch.last_update.isoformat() == HEADERS["Last-Update"]
    assert patch.test == HEADERS["Test"]
    assert patch.modules == ("vllm.answers",)


@pytest.mark.parametrize(
    ("target", "covered", "not_covered"),
    [
        ("==0.32.*", ["0.32.0", "0.32.1rc1", "0.32.0.dev3"], ["0.31.9", "0.33.0"]),
        ("==0.32.0 || ==0.33.*", ["0.32.0", "0.33.2"], ["0.32.1", "0.34"]),
        (">=0.32, <0.33.1", ["0.32.4", "0.33.0"], ["0.33.1"]),
    ],
)
def test_a_target_covers_versions(tmp_path, target, covered, not_covered):
    patch = load(tmp_path, patch_text(DIFF, HEADERS | {"Target": target}))
    assert [v for v in covered + not_covered if patch.target.covers(Version(v))] == covered


@pytest.mark.parametrize("field", HEADERS)
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_field_is_named(tmp_path, field, value):
    with pytest.raises(PatchError, match=f"header field {field} is missing"):
        load(tmp_path, patch_text(DIFF, HEADERS | {field: value}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("Forwarded", "maybe", "no, not-needed or an https address"),
        ("Last-Update", "29.11.2026", "a date"),
        ("Target", "0.32", "version specifiers"),
        ("Target", "==0.32.* ||", "version specifiers"),
        ("Test", "test_it", "a pytest node"),
    ],
)
def test_a_bad_value_is_named(tmp_path, field, value, expected):
    with pytest.raises(PatchError, match=f"header field {field}: expected {expected}.*") as error:
        load(tmp_path, patch_text(DIFF, HEADERS | {field: value}))
    assert repr(value) in str(error.value)


def test_a_field_given_twice_is_named(tmp_path):
    with pytest.raises(PatchError, match="header field Target is given twice"):
        load(tmp_path, "Target: ==0.31.*\n" + patch_text(DIFF))


@pytest.mark.parametrize("prefix", ["A remark.\n", "Description: x\n\nA remark.\n"])
def test_text_that_is_no_header_is_named(tmp_path, prefix):
    with pytest.raises(PatchError, match=r"expected 'Field: value' lines.*A remark"):
        load(tmp_path, prefix + patch_text(DIFF))


def test_a_patch_without_diff_or_in_another_encoding_is_refused(tmp_path):
    with pytest.raises(PatchError, match="no diff after the header"):
        load(tmp_path, patch_text(""))
    file = tmp_path / "latin.patch"
    file.write_bytes(b"Author: \xe9\n")
    with pytest.raises(PatchError, match="cannot be read"):
        load_patch(file)


def test_a_series_is_read_in_order_without_remarks(tmp_path):
    write_patches(tmp_path, {"0002-b.patch": "", "0001-a.patch": ""})
    assert read_series(tmp_path) == ["0002-b.patch", "0001-a.patch"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0002-b.patch", "series:3: there is no 0002-b.patch"),
        ("0001-a.patch", "series:3: 0001-a.patch is listed twice"),
        ("../0001-a.patch", "series:3: expected the name of a .patch file"),
        ("readme", "series:3: expected the name of a .patch file"),
    ],
)
def test_a_malformed_series_is_refused(tmp_path, line, message):
    write_patches(tmp_path, {"0001-a.patch": ""})
    series = tmp_path / "series"
    series.write_text(series.read_text() + line + "\n")
    with pytest.raises(PatchError, match=re.escape(message)):
        read_series(tmp_path)


def test_a_missing_series_is_named(tmp_path):
    with pytest.raises(PatchError, match="cannot read the series of patches"):
        read_series(tmp_path)
