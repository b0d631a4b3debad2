# SPDX-License-Identifier: Apache-2.0
"""Builds the extension with CMake and puts the start-up file vllm_arm.pth into wheels, editable ones too.

A cross build for aarch64 is asked for by VLLM_ARM_CROSS_ROOT, the root folder of an arm64 system that holds the
headers and libraries of its C and C++ library and of one Python 3.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.extension import Extension

SOURCE = Path(__file__).resolve().parent
STARTUP_FILE = "vllm_arm.pth"
ONEDNN_DISTRIBUTION = "onednn-devel-cpu-gomp"


def onednn_cmake_folder() -> Path | None:
    """Where the oneDNN that pip has installed keeps its CMake files; None where there is none."""
    try:
        files = importlib.metadata.files(ONEDNN_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    record, config = (
        next((file for file in files if file.name == name), None) for name in ("RECORD", "dnnl-config.cmake")
    )
    if record is None or config is None:
        return None
    # The metadata may be a link into another environment, to which the other paths are relative.
    site = Path(record.locate()).resolve().parent.parent
    return Path(site, config).resolve().parent


class Target:
    """What the extension is built for: this interpreter, or the Python of an arm64 root."""

    def __init__(self) -> None:
        self.root = os.environ.get("VLLM_ARM_CROSS_ROOT")
        if not self.root:
            self.python_include = sysconfig.get_path("include")
            self.module_suffix = sysconfig.get_config_var("EXT_SUFFIX")
            return
        includes = sorted(Path(self.root, "usr/include").glob("python3.*"))
        if not includes:
            sys.exit(f"VLLM_ARM_CROSS_ROOT={self.root}: no usr/include/python3.* there")
        self.python_include = str(includes[-1])
        self.python_tag = "cp" + includes[-1].name.removeprefix("python").replace(".", "")
        self.module_suffix = f".cpython-{self.python_tag[2:]}-aarch64-linux-gnu.so"

    def cmake_arguments(self) -> list[str]:
        """The definitions that tell CMake where the target's headers are."""
        import pybind11
        from torch.utils import cpp_extension

        arguments = [
            f"-DVLLM_ARM_PYTHON_INCLUDE={self.python_include}",
            f"-DVLLM_ARM_PYBIND11_INCLUDE={pybind11.get_include()}",
            f"-DVLLM_ARM_TORCH_INCLUDE={';'.join(cpp_extension.include_paths())}",
            f"-DVLLM_ARM_MODULE_SUFFIX={self.module_suffix}",
        ]
        for switch in ("VLLM_ARM_FETCH_ONEDNN", "VLLM_ARM_FETCH_KLEIDIAI"):
            if os.environ.get(switch, "0") not in ("", "0"):
                arguments.append(f"-D{switch}=ON")
        if not self.root and (folder := onednn_cmake_folder()):
            arguments.append(f"-Ddnnl_DIR={folder}")
        if self.root:
            arguments += [
                f"-DCMAKE_TOOLCHAIN_FILE={SOURCE / 'cmake/aarch64-clang.cmake'}",
                f"-DVLLM_ARM_SYSROOT={Path(self.root).resolve()}",
            ]
        return arguments


TARGET = Target()


class CMakeBuild(build_ext):
    """Builds _C and _host in one CMake run; puts them, with the libraries they need, where setuptools expects them."""

    def get_ext_filename(self, fullname: str) -> str:
        folder, _, name = fullname.rpartition(".")
        suffix = TARGET.module_suffix if name == "_host" else ".so"
        return str(Path(*folder.split("."), name + suffix))

    def run(self) -> None:
        build = Path(self.build_temp).resolve()
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        jobs = str(os.cpu_count() or 1)
        configure = ["cmake", "-S", str(SOURCE), "-B", str(build), *generator]
        subprocess.run([*configure, *TARGET.cmake_arguments()], check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)
        for extension in self.extensions:
            destination = Path(self.get_ext_fullpath(extension.name))
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build / Path(self.get_ext_filename(extension.name)).name, destination)
        libraries = Path(self.get_ext_fullpath("vllm_arm._C")).with_name("lib")
        shutil.rmtree(libraries, ignore_errors=True)
        if (build / "lib").is_dir():
            shutil.copytree(build / "lib", libraries)


class BuildWithStartupFile(build_py):
    """Copies the .pth file to the top of the wheel, which is site-packages once it is installed."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(str(SOURCE / STARTUP_FILE), str(Path(self.build_lib, STARTUP_FILE)))


class EditableWithStartupFile(editable_wheel):
    """Adds the .pth file to the editable wheel, into which build_py's files do not go."""

    def _select_strategy(self, *arguments):  # type: ignore[no-untyped-def]
        strategy = super()._select_strategy(*arguments)

        class WithStartupFile:
            def __enter__(self) -> object:
                strategy.__enter__()
                return self

            def __exit__(self, *exception: object) -> object:
                return strategy.__exit__(*exception)

            def __call__(self, wheel, files, mapping) -> None:  # type: ignore[no-untyped-def]
                strategy(wheel, files, mapping)
                wheel.write(str(SOURCE / STARTUP_FILE), STARTUP_FILE)

        return WithStartupFile()


class TargetWheel(bdist_wheel):
    """Tags a cross-built wheel for the machine that it is for."""

    def get_tag(self) -> tuple[str, str, str]:
        if TARGET.root:
            return TARGET.python_tag, TARGET.python_tag, "linux_aarch64"
        return super().get_tag()


class TargetBuild(build):
    """Keeps what is built for another machine apart from what is built for this one."""

    def initialize_options(self) -> None:
        super().initialize_options()
        if TARGET.root:
            self.build_base = "build/linux-aarch64"


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution,
    ext_modules=[Extension("vllm_arm._C", []), Extension("vllm_arm._host", [])],
    cmdclass={
        "build": TargetBuild,
        "build_ext": CMakeBuild,
        "build_py": BuildWithStartupFile,
        "editable_wheel": EditableWithStartupFile,
        "bdist_wheel": TargetWheel,
    },
)
