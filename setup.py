"""Package metadata; the tools are configured in pyproject.toml."""

import importlib.util
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "dcformer" / "version_dcformer.py").read_text(encoding="utf-8")
).group(1)

# For whoever publishes the package: the address of the repository. It becomes the links on the package's page and makes
# the README's links to files absolute there. Nothing else has to be filled in.
REPOSITORY = ""

EXTRAS = {
    "convert": ["tensorstore>=0.1.78", "ml_dtypes", "msgpack", "pyyaml", "gguf", "accelerate>=1.1"],
    "eval": ["lm-eval>=0.4.13", "datasets>=4", "accelerate>=1.1", "matplotlib", "pandas", "scipy", "tabulate"],
    "demo": ["gradio>=6", "matplotlib"],
    "analysis": [
        "pandas",
        "matplotlib",
        "transformer-lens>=4.3,<5",
        "nnsight>=0.8",
        "circuitsvis>=1.43",
        "bertviz>=1.4",
    ],
    "train": ["accelerate>=1.1", "datasets>=4.3", "omegaconf>=2.4", "pandas", "scipy", "matplotlib", "tensorboard"],
    "finetune": ["peft>=0.17", "trl>=1.8", "accelerate>=1.1", "datasets>=4.3"],
    "quantization": ["torchao>=0.16", "bitsandbytes>=0.49", "optimum-quanto>=0.2.7", "accelerate>=1.1"],
    "export": ["onnx", "onnxruntime", "onnxscript"],
    "serve": ["transformers[serving]"],
    "vllm": ["vllm>=0.32,<0.34"],
    "docs": ["furo", "myst-parser", "sphinx>=8", "sphinx-copybutton"],
    "dev": [
        "dcformer[convert,eval,demo,analysis,train,finetune,quantization,export,docs]",
        "hypothesis",
        "ipykernel",
        "mypy",
        "nbclient",
        "nbformat",
        "orbax-checkpoint",
        "pillow",
        "playwright",
        "pytest",
        "pytest-cov",
        "pytest-xdist",
        "ruff",
        "scikit-learn",
        # The tests run the kernels in its interpreter; a build of torch for CPUs does not bring it.
        "triton>=3.6; platform_system == 'Linux'",
        "uv",
    ],
}


class BuildLibraries(build_ext):
    """
    Compile the operator for CPUs, for all instruction sets that machines of this kind have. Where that fails, the
    package is installed all the same, and tries once more when the operator is first used.
    """

    def build_extension(self, extension: Extension) -> None:
        cpu = ROOT / "dcformer" / "kernels" / "cpu"
        spec = importlib.util.spec_from_file_location("build", cpu / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        is_in_place = self.inplace or self.editable_mode
        folder = cpu / "csrc" if is_in_place else Path(self.get_ext_fullpath(extension.name)).parent
        try:
            for instruction_set in build.instruction_sets():
                build.compile_library(instruction_set, folder)
        except OSError as error:
            raise CompileError(str(error)) from error


class PlatformWheel(bdist_wheel):
    """A wheel of this platform for every Python: the compiled libraries hold no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def project_urls() -> dict[str, str]:
    urls = {"Paper": "https://arxiv.org/abs/2405.08553"}
    if REPOSITORY:
        urls |= {
            "Source": REPOSITORY,
            "Documentation": f"{REPOSITORY}/tree/main/docs",
            "Issues": f"{REPOSITORY}/issues",
        }
    return urls


def long_description() -> str:
    """The README; once there is a repository, with links that also work outside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"(!\[[^]]*\])\((?!https?://)", rf"\1({REPOSITORY}/raw/main/", text)
    return re.sub(r"\]\((?!https?://)", f"]({REPOSITORY}/blob/main/", text)


setup(
    name="dcformer",
    version=VERSION,
    description="DCFormer (Dynamically Composable Multi-Head Attention, ICML 2024) for HuggingFace Transformers",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The dcformer contributors",
    project_urls=project_urls(),
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["transformers", "attention", "language model", "DCMHA", "DCFormer", "DCPythia"],
    packages=find_packages(include=["dcformer", "dcformer.*"]),
    py_modules=["dcformer_command"],
    package_data={
        "dcformer": ["py.typed"],
        "dcformer.kernels.cpu": ["csrc/*.cpp", "csrc/*.h"],
        "dcformer.pretrained": ["*/*"],
        "dcformer.head_tasks": ["vocabulary.json", "authors_facts.bin"],
        "dcformer.training": ["recipes/*.yaml"],
        "dcformer.eval": ["tasks/*.yaml", "tasks/CHANGELOG.md", "published/*.json"],
    },
    ext_modules=[Extension("dcformer.kernels.cpu.csrc.library", sources=[], optional=True)],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
    entry_points={
        "console_scripts": ["dcformer = dcformer_command:main"],
        "transformer_lens.architectures": [
            f"{family}ForCausalLM = dcformer.analysis.transformer_lens:DCFormerAdapter"
            for family in ("DCFormer", "DCPythia")
        ],
        "vllm.general_plugins": ["dcformer = dcformer.vllm.registration:register"],
    },
    python_requires=">=3.11",
    install_requires=["torch>=2.10", "transformers>=5.17,<6", "filelock", "safetensors", "numpy", "typer", "rich"],
    extras_require=EXTRAS,
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
