"""An authority and certificates for mutual TLS, made with the openssl program; no test needs a crypto package."""

import subprocess
from pathlib import Path

from prefill_plan.config import TlsConfig


def make_tls(folder: Path, *, name: str = "peer", authority: str = "authority") -> TlsConfig:
    """Certificate of `name` for localhost and 127.0.0.1, signed by `authority`; both made when they are not there."""
    root, root_key = folder / f"{authority}.pem", folder / f"{authority}.key"
    key, request, certificate = (folder / f"{name}-{authority}{suffix}" for suffix in (".key", ".csr", ".pem"))
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    if not root.exists():
        _openssl("req", "-x509", *curve, "-keyout", root_key, "-out", root, "-days", "2", "-subj", f"/CN={authority}")
    names = folder / "names.cnf"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", *curve, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    signing = ("-CA", root, "-CAkey", root_key, "-CAcreateserial", "-days", "2", "-extfile", names)
    _openssl("x509", "-req", "-in", request, *signing, "-out", certificate)
    return TlsConfig(certificate=str(certificate), key=str(key), authority=str(root))


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
