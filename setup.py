"""Builds the native library of ``pallas_kernels``; everything else is in pyproject.toml.

The compiler is the system's C++ compiler, else the one in the package ziglang, which is then a
requirement of the build. If it fails, the installation goes on without the library.
"""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = "pallas_kernels/native"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-w")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
X86_64 = {"variant_avx512": AVX512, "variant_avx2": AVX2}
ARM_64 = {"variant_neon": ("-mcpu=generic+dotprod",)}  # Zig does not know -march=armv8.2-a+dotprod
MACHINES = {"x86_64": X86_64, "AMD64": X86_64, "aarch64": ARM_64, "arm64": ARM_64}


def compiler() -> list[str] | None:
    """The command of a C++ compiler, if there is one."""
    given = os.environ.get("CXX") or shutil.which("c++") or shutil.which("clang++")
    return given.split() if given else None


def zig() -> list[str]:
    """The command of the compiler in ziglang, for any processor of this architecture."""
    command = [sys.executable, "-m", "ziglang", "c++"]
    if sys.platform == "linux":  # else for this very processor, even the plain variant
        command += ["-target", f"{platform.machine()}-linux-gnu"]
    return command


class BuildNative(build_ext):
    """Compiles each variant with the instructions that it uses."""

    def build_extension(self, ext: Extension) -> None:
        """Compile each source with a command of its own, as many at once as there are cores."""
        from jax.ffi import include_dir

        command = compiler() or zig()
        variants = {
            "handlers": (),
            "convert": (),
            "variant_plain": (),
            **MACHINES.get(platform.machine(), {}),
        }
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        version = runpy.run_path(f"{NATIVE}/sources.py")["version"]()
        defined = f'-DJAXINFER_VERSION="{version}"'
        flags = [*command, *FLAGS, defined, f"-I{include_dir()}", "-c"]

        def compiled(name: str) -> str:
            target = str(objects / f"{name}.o")
            source = f"{NATIVE}/src/{name}.cc"
            subprocess.check_call([*flags, *variants[name], source, "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(compiled, variants))
        library = self.get_ext_fullpath(ext.name)
        Path(library).parent.mkdir(parents=True, exist_ok=True)
        subprocess.check_call([*command, "-shared", "-o", library, *made])

    def run(self) -> None:
        """Build, or say why not."""
        try:
            super().run()
        except Exception as error:  # no compiler, no headers: any failure leaves the library out
            print(f"jaxinfer: the native library is left out: {error}", file=sys.stderr)


def files(*endings: str) -> list[str]:
    """The native sources with these endings, which belong to a source distribution."""
    folder = Path(__file__).parent / NATIVE / "src"
    return sorted(f"{NATIVE}/src/{p.name}" for p in folder.iterdir() if p.suffix in endings)


setup(
    ext_modules=[
        Extension(
            "pallas_kernels.native._library",
            sources=files(".cc"),
            depends=files(".h", ".inc"),
        )
    ],
    cmdclass={"build_ext": BuildNative},
    setup_requires=["jax>=0.11.2,<0.12"] + ([] if compiler() else ["ziglang"]),
)
