"""The hub: pushed in one commit, pulled and checked. Against a stub on this machine; no network."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from builders import images, tiny_backbone, trained
from vit_memory import Bundle, DamagedFile, FileError

hub_library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

from vit_memory.files import sharing  # noqa: E402

COMMIT = "c" * 40


class StubHub(BaseHTTPRequestHandler):
    """The parts of the hub that a push and a pull need: create, check the card, preupload, commit, list, resolve."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, value, status=200, headers=()):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers:
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.body()
        files = self.server.files
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            request = json.loads(body)
            if request["name"] == "forbidden":
                return self.send(
                    {"error": "You don't have the rights"}, 403, [("X-Error-Message", "You don't have the rights")]
                )
            return self.send(
                {"url": f"{self.server.address}/user/{request['name']}", "name": f"user/{request['name']}"}
            )
        if self.path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            request = json.loads(body)["files"]
            return self.send(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in request]}
            )
        if "/commit/" in self.path:
            self.server.commits += 1
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self.send({"commitUrl": f"{self.server.address}/user/repo/commit/{COMMIT}", "commitOid": COMMIT})
        return self.send({"error": f"unknown {self.path}"}, 404)

    def do_GET(self):
        files = self.server.files
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/user/repo/revision"):
            siblings = [{"rfilename": name} for name in files]
            return self.send({"id": "user/repo", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        if path.startswith("/api/models/user/repo/tree"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return self.send(tree)
        _, _, name = path.partition(f"/user/repo/resolve/{COMMIT}/")
        if name not in files:
            return self.send({"error": "not found"}, 404, [("X-Error-Code", "RepoNotFound")])
        content = files[name]
        return self.send(content, 200, [("ETag", f'"{hashlib.sha1(content).hexdigest()}"'), ("X-Repo-Commit", COMMIT)])

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def stub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubHub)
    server.files, server.commits, server.tokens = {}, 0, set()
    server.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bundle(tmp_path):
    backbone = tiny_backbone()
    coarse = trained(backbone, "coarse", labels=["a | b", "<script>"])
    fine = trained(backbone, "fine", parents=[coarse])
    return Bundle.create(tmp_path / "bundle", backbone, [coarse]).add([fine], half=True)


def test_a_pushed_bundle_is_pulled_unchanged(stub, bundle, tmp_path):
    address = sharing.push(bundle, "user/repo", endpoint=stub.address, token="secret")
    assert address == f"{stub.address}/user/repo/commit/{COMMIT}"
    assert stub.commits == 1, "one commit, so that no pull gets half a bundle"
    assert stub.tokens == {"Bearer secret"}
    assert sorted(stub.files) == ["README.md", "bundle.json", "tasks/coarse.safetensors", "tasks/fine.safetensors"]
    pulled = sharing.pull("user/repo", out=tmp_path / "pulled", endpoint=stub.address)
    assert pulled.folder == tmp_path / "pulled"
    for name in ("bundle.json", "tasks/coarse.safetensors", "tasks/fine.safetensors"):
        assert (pulled.folder / name).read_bytes() == (bundle.folder / name).read_bytes(), name
    expected, outputs = (b.model(tiny_backbone())(images()) for b in (bundle, pulled))
    assert all(torch.equal(expected[name], outputs[name]) for name in expected)
    cached = Bundle.from_pretrained("user/repo", endpoint=stub.address)
    assert list(cached.check()) == ["coarse", "fine"]


def test_the_card_is_written_from_the_bundle(stub, bundle):
    sharing.push(bundle, "user/repo", endpoint=stub.address, token="secret")
    card = stub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: vit-memory\n")
    assert 'bundle = Bundle.from_pretrained("user/repo")' in card
    assert "| fine | single-label | 3: a, b, c | memory, 5 cells | coarse | none recorded |" in card
    assert "2: a / b, ‹script›" in card, "labels cannot add markup"


def test_a_damaged_bundle_is_neither_pushed_nor_pulled(stub, bundle, tmp_path):
    sharing.push(bundle, "user/repo", endpoint=stub.address, token="secret")
    content = stub.files["tasks/fine.safetensors"]
    stub.files["tasks/fine.safetensors"] = content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        sharing.pull("user/repo", out=tmp_path / "pulled", endpoint=stub.address)
    assert not (tmp_path / "pulled").exists()
    path = bundle.folder / "tasks" / "fine.safetensors"
    path.write_bytes(stub.files["tasks/fine.safetensors"])
    with pytest.raises(DamagedFile):
        sharing.push(bundle, "user/repo", endpoint=stub.address, token="secret")
    assert stub.commits == 1


def test_a_refusal_of_the_hub_is_reported(stub, bundle, tmp_path):
    with pytest.raises(FileError, match=r"user/forbidden: cannot be pushed to the hub: .*403"):
        sharing.push(bundle, "user/forbidden", endpoint=stub.address, token="secret")
    with pytest.raises(FileError, match="user/nothing: cannot be pulled from the hub"):
        sharing.pull("user/nothing", endpoint=stub.address)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileError, match="is not an empty folder"):
        sharing.pull("user/repo", out=tmp_path / "full", endpoint=stub.address)
