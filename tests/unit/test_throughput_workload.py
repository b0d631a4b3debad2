# SPDX-License-Identifier: Apache-2.0
"""Workloads of the throughput benchmark: models, data sets, what identifies them."""

import json
from pathlib import Path

import pytest

from benchmarks.serving.workload import Workload, is_quantised, read_dataset, resolve_model


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_of_a_dataset(tmp_path: Path) -> None:
    dataset = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "output_tokens": 7},
        "",
        {"prompt_token_ids": [5, 6]},
        {"prompt": "b"},
    )
    assert read_dataset(dataset, None, 3) == (
        {"prompt": "a", "output_len": 7},
        {"prompt_token_ids": [5, 6], "output_len": 3},
        {"prompt": "b", "output_len": 3},
    )
    assert len(read_dataset(dataset, 2, 3)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: expected JSON"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"text": "a"}', "line 2: expected 'prompt' .text. or 'prompt_token_ids'"),
        ('{"prompt": ""}', "line 2: expected 'prompt'"),
        ('{"prompt_token_ids": ["a"]}', "line 2: expected 'prompt'"),
        ('{"prompt": "a", "output_tokens": 0}', "line 2: output_tokens: expected a positive integer, got 0"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_dataset(write(tmp_path / "prompts.jsonl", {"prompt": "good"}, row), None, 3)


def test_too_few_rows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--num-prompts: .* has only 1 rows, expected at least 2"):
        read_dataset(write(tmp_path / "prompts.jsonl", {"prompt": "a"}), 2, 3)
    with pytest.raises(ValueError, match="has no rows"):
        read_dataset(write(tmp_path / "none.jsonl", ""), None, 3)


def test_models(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder with config"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / ".." / tmp_path.name)) == str(tmp_path)
    assert resolve_model("someone/a-model") == "someone/a-model"
    with pytest.raises(ValueError, match="--model: no folder"):
        resolve_model("./missing")


def test_engine_arguments_of_the_user_win() -> None:
    workload = Workload("m", 8, 4, 2, engine_arguments=("--enable-prefix-caching",))
    arguments = workload.arguments()
    assert arguments.index("--enable-prefix-caching") > arguments.index("--no-enable-prefix-caching")


def test_the_description_holds_a_digest_of_the_requests() -> None:
    first = Workload("m", 8, 4, 1, dataset="d", requests=({"prompt": "a", "output_len": 1},))
    second = Workload("m", 8, 4, 1, dataset="d", requests=({"prompt": "b", "output_len": 1},))
    assert first.describe() != second.describe()
    assert json.loads(json.dumps(first.describe())) == first.describe()
    assert "requests" not in first.describe()


def test_models_that_are_quantised_already(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_quantised(str(tmp_path), ("--enforce-eager",))
    assert is_quantised(str(tmp_path), ("--quantization=arm_int8",))
    assert is_quantised("someone/a-model", ("-q", "arm_int8"))
    assert not is_quantised("someone/a-model", ())
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert is_quantised(str(tmp_path), ())
