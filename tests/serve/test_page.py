"""The page at ``/``: its files and headers, and its modules in node."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from places import ROOT, TESTS
from serve_support import PATIENCE_S, ServerProcess, serving

from moechat.serve.page_files import page_routes

FILES = ROOT / "moechat" / "serve" / "page"
KEY = "secret-key-1234567890"
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key."""
    directory = tmp_path_factory.mktemp("page-key")
    (directory / "key.txt").write_text(KEY)
    with serving(directory, "demo", "--api-key-file", str(directory / "key.txt")) as server:
        yield server


# ---- files and headers


def test_every_file_of_the_page_is_served_as_it_is(client: httpx.Client) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".png": "image/png"}
    paths = {path.name for path in FILES.iterdir()}
    assert {"index.html", "style.css", "script.js", "icon.png"} < paths
    for name in paths:
        response = client.get("/" if name == "index.html" else f"/page/{name}")
        assert response.status_code == 200
        assert response.content == (FILES / name).read_bytes()
        assert response.headers["content-type"].partition(";")[0] == kinds[Path(name).suffix]
        assert response.headers["x-content-type-options"] == "nosniff"


def test_the_policy_forbids_everything_but_files_of_this_server(client: httpx.Client) -> None:
    for path in (route.path for route in page_routes()):
        headers = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert headers["referrer-policy"] == "no-referrer"


def test_head_has_the_headers_without_the_page(client: httpx.Client) -> None:
    response = client.head("/")
    assert response.status_code == 200
    assert response.content == b""
    assert int(response.headers["content-length"]) == (FILES / "index.html").stat().st_size
    assert client.post("/").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/index.html",
        "/page/x.js",
        "/index.html",
        "/page/../page_files.py",
        "/page/%2e%2e/page_files.py",
        "/page/..%2fpage_files.py",
        "/favicon.ico",
    ],
)
def test_other_paths_stay_unknown(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_every_file_that_is_named_exists_and_every_file_is_named() -> None:
    html = (FILES / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', html))
    for script in FILES.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
    assert named | {"index.html"} == {path.name for path in FILES.iterdir()}


def test_the_page_names_no_other_server_and_has_no_code_within_its_html() -> None:
    for path in FILES.iterdir():
        if path.suffix == ".png":
            continue
        text = path.read_text()
        assert not re.search(r"(https?:|wss?:)?//[a-z0-9-]+\.[a-z]", text, re.IGNORECASE), path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(", text
        )
    html = (FILES / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|javascript:", html)


def test_every_element_that_scripts_look_up_is_in_the_html() -> None:
    html = (FILES / "index.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for script in FILES.glob("*.js"):
        assert set(re.findall(r'byId\("([^"]+)"\)', script.read_text())) <= set(ids)
    for target in re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', html):
        assert target in ids


def test_with_a_key_the_page_is_open_and_nothing_else(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        for path in (route.path for route in page_routes()):
            assert client.get(path).status_code == 200
        for path in ("/moechat/state", "/moechat/state/stream", "/v1/models", "/page/x.js", "/page"):
            assert client.get(path).status_code == 401


def test_pages_of_other_names_are_refused(demo: ServerProcess) -> None:
    with demo.client() as client:
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403


def test_the_files_are_in_the_wheel() -> None:
    pathutil = pytest.importorskip("scikit_build_core.build._pathutil")
    mapping = pathutil.packages_to_file_mapping(
        packages={"moechat": str(ROOT / "moechat")},
        platlib_dir=Path("/wheel"),
        include=(),
        src_exclude=(),
        target_exclude=(),
        build_dir="",
        mode="default",
    )
    wheel = {Path(target).name for target in mapping.values() if "/serve/page/" in str(target)}
    assert wheel == {path.name for path in FILES.iterdir()}


# ---- modules


@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_the_modules_pass_their_own_checks(tmp_path: Path) -> None:
    shutil.copytree(FILES, tmp_path / "page")
    shutil.copy(TESTS / "support" / "page_checks.mjs", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--test", "page_checks.mjs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^# pass (1[5-9]|[2-9]\d)$", done.stdout, re.MULTILINE), done.stdout
