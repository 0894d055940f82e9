"""Builds the package `shardrun`: the folders of the repository, installed beside each other under one name.

    site-packages/shardrun/         from shardrun/, and train.py
    site-packages/shardrun/fsdp/    from fsdp/; launch, slurm and recipes alike

Importing `shardrun` puts that folder on sys.path (shardrun/__init__.py): the code keeps its imports, `fsdp`
and `launch`, and takes no such name in site-packages.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CODE, FILES = ("fsdp", "launch"), ("slurm", "recipes")


class BuildWithTrain(build_py):
    """build_py that adds train.py, which lies outside the package's folder; to an sdist too."""

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), "train.py"]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file("train.py", str(Path(self.build_lib, "shardrun", "train.py")))


setup(
    packages=[
        "shardrun",
        *(f"shardrun.{folder}" for folder in FILES),
        *(f"shardrun.{name}" for name in find_packages(include=[f"{part}*" for part in CODE])),
    ],
    package_dir={f"shardrun.{folder}": folder for folder in (*CODE, *FILES)},
    package_data={
        "": ["templates/*", "*.npz", "*.md", "*.toml", "*/config.json", "*.sh", "*.sbatch", "*.env"]
    },
    cmdclass={"build_py": BuildWithTrain},
)
