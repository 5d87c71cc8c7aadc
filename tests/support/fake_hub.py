"""A Hub server in this process that serves local folders, with faults on demand."""

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants


class FakeHub:
    """Serves folders as models.

    Attributes:
        models: {name: folder}.
        answers: Every request for a file as (path, range, bytes of the body).
        faults: Names of active faults: see `_Handler`.
        token: The required token; None for none.
        created: {name: True if private} of repositories that clients created.
        uploaded: {name: {file: content}} of their commits.
    """

    def __init__(self, models):
        self.models, self.answers, self.faults, self.token = dict(models), [], set(), None
        self.created, self.uploaded = {}, {}
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, name):
        return hashlib.sha1(name.encode()).hexdigest()

    @property
    def sent(self):
        return sum(nbytes for _, _, nbytes in self.answers)


@contextlib.contextmanager
def running(hub, monkeypatch):
    """Makes the server the Hub of huggingface_hub, as HF_ENDPOINT would at its import."""
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("hfq.integrations.hub.fetch._RETRIES", 0)
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """A server that prints nothing when a client disconnects, as clients do after an error."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet, since the client waits 40 ms for a second one

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
            code = 403 if "authorization" in self.headers else 401
            return self._send(code, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "no leave"})
        if found := re.fullmatch(r"/api/models/((?:[^/]+/)?[^/]+)(?:/revision/(.+))?", path):
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            return self._tree(found[1])
        if found := re.fullmatch(r"/((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*found.groups())
        if path.count("/") < 3:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        _, _, name, file = path.split("/", 3)
        return self._file(name.replace("--", "/"), file)

    def do_POST(self):
        """Answers the requests of an upload."""
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["content-length"]))
        if "read-only" in hub.faults:
            return self._send(403, b"{}", {"X-Error-Message": "no leave"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.created[name] = asked.get("visibility") == "private" or asked.get("private") is True
            return self._send(200, json.dumps({"url": f"{hub.url}/{name}", "name": name}).encode())
        if path == "/api/validate-yaml":
            return self._send(200, b'{"errors": [], "warnings": []}')
        name, kind = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path).groups()
        if kind == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._send(200, json.dumps({"files": files}).encode())
        lines = [json.loads(line) for line in body.splitlines()]
        hub.uploaded.setdefault(name, {}).update(
            {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
        )
        url = f"{hub.url}/{name}/commit/{hub.commit(name)}"
        return self._send(200, json.dumps({"commitUrl": url, "commitOid": hub.commit(name)}).encode())

    def do_HEAD(self):
        """Answers the request that huggingface_hub sends before it downloads a whole file."""
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        name, commit, file = re.fullmatch(r"/((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)", path).groups()
        if name not in hub.models:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if not (hub.models[name] / file).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = (hub.models[name] / file).read_bytes()
        self.send_response(200)
        for header, value in {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()

    def _info(self, name, revision):
        hub = self.server.hub
        if name not in hub.models:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", hub.commit(name)):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        root = hub.models[name]
        files = sorted(file for file in root.rglob("*") if file.is_file())
        siblings = [
            {"rfilename": file.relative_to(root).as_posix(), "size": file.stat().st_size} for file in files
        ]
        sha = "nothing" if "no commit" in hub.faults else hub.commit(name)
        return self._send(
            200, json.dumps({"id": name, "sha": sha, "private": False, "siblings": siblings}).encode()
        )

    def _tree(self, name):
        root = self.server.hub.models[name]
        files = sorted(file for file in root.rglob("*") if file.is_file())
        entries = [
            {
                "type": "file",
                "oid": "0" * 40,
                "path": file.relative_to(root).as_posix(),
                "size": file.stat().st_size,
            }
            for file in files
        ]
        return self._send(200, json.dumps(entries).encode())

    def _resolve(self, name, commit, file):
        hub = self.server.hub
        assert commit == hub.commit(name), "a request that names no commit"
        if not file.endswith(".safetensors") or "range" not in self.headers:
            return self._file(name, file)
        part = self.headers["range"].removeprefix("bytes=").partition("-")[0]
        tag = "other" if "other tag" in hub.faults and part != "0" else "same"
        told = "f" * 40 if "other commit" in hub.faults else commit
        target = f"{hub.url}/files/{name.replace('/', '--')}/{file}"
        return self._send(302, b"", {"Location": target, "X-Repo-Commit": told, "X-Linked-ETag": f'"{tag}"'})

    def _file(self, name, file):
        hub = self.server.hub
        data = (hub.models[name] / file).read_bytes()
        asked = self.headers.get("range")
        extra, code, body = {"ETag": '"tag"'}, 200, data
        if asked and "no ranges" not in hub.faults:
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
            total = len(data) + ("other size" in hub.faults)
            code, body = 206, data[first : last + 1]
            extra["Content-Range"] = f"bytes {first}-{last}/{total}"
        hub.answers.append((f"{name}/{file}", asked, len(body)))
        if "busy" in hub.faults and asked:
            return self._send(503, b"", {})
        return self._send(code, body, extra, cut="cut" in hub.faults and asked is not None)

    def _send(self, code, body, headers=(), cut=False):
        self.send_response(code)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
