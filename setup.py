"""Build megatron-min: megatron_min.py, and the C file _helpers.c if a C compiler is available.

pip install .                          builds the C file, or continues without it if that fails
                                       (pip -v says why)
MEGATRON_MIN_C=1 pip install .         fails if the C file cannot be built (for CI and wheels)
MEGATRON_MIN_C=0 pip install .         calls no compiler
python setup.py build_ext --inplace    puts _megatron_min beside the sources

MEGATRON_MIN_CFLAGS adds flags for compiler and linker, such as "-O1 -g -fsanitize=address".  With
flags, too, the build fails if the C file cannot be built.

A wheel with C works on one platform, with each Python from 3.11 on (cp311-abi3).  A wheel without
C is pure Python (py3-none-any).
"""

import os
import re
import shlex
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
SOURCE = (HERE / "megatron_min.py").read_text(encoding="utf-8")
README = HERE / "README.md"
C_WANTED = os.environ.get("MEGATRON_MIN_C", "")  # "0": no; "1": required; "": if it can be built
FLAGS = shlex.split(os.environ.get("MEGATRON_MIN_CFLAGS", ""))
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # Python without a GIL has no limited API


class CompleteSdist(sdist):
    """Include everything that a packager needs to build and to test, with C or without."""

    def make_distribution(self):
        self.filelist.extend(["_helpers.c", "test_megatron_min.py", "bench.py"])
        self.filelist.extend([".pytest.ini", ".ruff.toml"])
        super().make_distribution()


class BuildWithOrWithout(build_ext):
    """If the extension cannot be built, leave it out, and mark the wheel as pure Python."""

    def run(self):
        outputs = [Path(path) for path in self.get_outputs()]
        in_place = [Path(self.get_ext_fullpath(each.name)) for each in self.extensions]
        for path in [*outputs, *in_place]:  # so that an older file is not taken for the new one
            path.unlink(missing_ok=True)
        super().run()
        if not all(path.exists() for path in outputs):
            self.distribution.ext_modules = []
            wheel = self.distribution.command_obj.get("bdist_wheel")
            if wheel:
                wheel.root_is_pure = True


ext_modules = []
if C_WANTED != "0":
    extension = Extension(
        "_megatron_min",
        ["_helpers.c"],
        # Blends need IEEE rounding, so no flag may enable fused multiply-add.
        extra_compile_args=["-O3", *FLAGS, "-ffp-contract=off"],
        extra_link_args=FLAGS,
        py_limited_api=LIMITED,
        optional=C_WANTED != "1" and not FLAGS,  # flags make sense only with C
    )
    ext_modules.append(extension)

options = {"build_ext": {"force": True}}  # the flags may have changed since the last build
if LIMITED:
    options["bdist_wheel"] = {"py_limited_api": "cp311"}

long_description = ""
if README.exists():
    long_description = README.read_text(encoding="utf-8")

setup(
    name="megatron-min",
    version=re.search(r'^__version__ = "(.+)"$', SOURCE, re.M)[1],
    description="Megatron-LM's GPT data path in one file: text to resumable batches, bit for bit",
    long_description=long_description,
    long_description_content_type="text/markdown",
    license="MIT",
    keywords=["Megatron-LM", "GPT", "pretraining", "dataset", "data loader", "tokenized corpus"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    py_modules=["megatron_min"],
    entry_points={"console_scripts": ["megatron-min = megatron_min:main"]},
    install_requires=["numpy>=1.26", "torch>=2.8"],  # the oldest versions that were tested
    extras_require={
        "test": ["pytest", "pytest-benchmark", "setuptools>=70.1"],  # setuptools builds wheels
        "tools": [
            "backports.zstd; python_version < '3.14'",  # .zst; Python 3.14 has it
            "gigatoken>=0.10",
            "nltk>=3.9",  # --split-sentences
            "tokenizers",
            "tqdm",
        ],
        # pyarrow reads .parquet; s3fs reads s3://, and its aiohttp http:// and https://
        "storage": ["pyarrow", "s3fs>=2024.2"],  # pip might choose a version of 2020
        "parity": ["megatron-core==0.16.1"],  # the reference of the tests and of bench.py
    },
    ext_modules=ext_modules,
    options=options,
    cmdclass={"build_ext": BuildWithOrWithout, "sdist": CompleteSdist},
)
