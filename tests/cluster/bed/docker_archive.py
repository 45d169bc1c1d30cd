"""docker_archive.py OUT.tar REF FILE [USER]: a one-layer image holding FILE as /FILE, its entry point. No image tool needed."""

import hashlib
import io
import json
import os
import sys
import tarfile

out, ref, path, *user = sys.argv[1:]
name = os.path.basename(path)
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as t:
    info = tarfile.TarInfo(name)
    info.size = os.path.getsize(path)
    info.mode = 0o755
    with open(path, "rb") as f:
        t.addfile(info, f)
blob = layer.getvalue()
config = json.dumps(
    {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/" + name], "User": "".join(user)},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(blob).hexdigest()]},
    }
).encode()
cfg = hashlib.sha256(config).hexdigest() + ".json"
manifest = json.dumps([{"Config": cfg, "RepoTags": [ref], "Layers": ["layer.tar"]}]).encode()
with tarfile.open(out, "w") as t:
    for n, b in ((cfg, config), ("layer.tar", blob), ("manifest.json", manifest)):
        info = tarfile.TarInfo(n)
        info.size = len(b)
        t.addfile(info, io.BytesIO(b))
