"""External metrics from a file, served as the aggregated API that HPAs read: a stand-in for KEDA or prometheus-adapter.

The file holds {metric name: value} and is read at each request; without a file, or for unknown names, the answer is 503 or 404.
"""

import argparse
import json
import ssl
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

GROUP = "external.metrics.k8s.io/v1beta1"


def application(values: Path) -> web.Application:
    async def discovery(_: web.Request) -> web.Response:
        resource = {
            "name": "*",
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        return web.json_response(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [resource]}
        )

    async def metric(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not values.exists():
            return web.Response(status=503, text="the metrics source is away")
        known = json.loads(values.read_text())
        if name not in known:
            return web.Response(status=404, text=f"no metric {name}")
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        item = {"metricName": name, "metricLabels": {}, "timestamp": stamp, "value": str(known[name])}
        return web.json_response(
            {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": [item]}
        )

    app = web.Application()
    app.router.add_get(f"/apis/{GROUP}", discovery)
    app.router.add_get(f"/apis/{GROUP}/namespaces/{{namespace}}/{{name}}", metric)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(prog="metrics_stub", description=__doc__)
    parser.add_argument("--values", type=Path, required=True)
    parser.add_argument("--certificate", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(args.certificate, args.key)
    web.run_app(application(args.values), host="127.0.0.1", port=args.port, ssl_context=tls, print=None)


if __name__ == "__main__":
    main()
