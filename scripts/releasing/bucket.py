"""A bucket over https with a private authority: so much of S3 as a remote needs, in memory."""

import hashlib
import re
import ssl
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from .base import needs, run

ROW = "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{}</ETag><Size>{}</Size></Contents>"
LIST = '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>'


def tag(content):
    """An object's ETag."""
    return f'"{hashlib.md5(content).hexdigest()}"'


class Answers(BaseHTTPRequestHandler):
    """The answers of the bucket. Objects are by path."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Prints nothing."""

    def answer(self, status, content=b"", **headers):
        """Sends an answer; to HEAD without its content."""
        self.send_response(status)
        sent = {"Content-Length": len(content), **{name.replace("_", "-"): value for name, value in headers.items()}}
        for name, value in sent.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def name(self):
        """The object of the request."""
        return unquote(urlsplit(self.path).path)

    def content(self):
        """The request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self):
        """Stores an object, unless it must be a new one."""
        content, objects = self.content(), self.server.objects
        with self.server.lock:
            if self.headers.get("If-None-Match") == "*" and self.name() in objects:
                return self.answer(412)
            objects[self.name()] = content
        return self.answer(200, ETag=tag(content))

    def do_GET(self):
        """An object, a range of it, or a listing."""
        asked = parse_qs(urlsplit(self.path).query)
        if "list-type" in asked:
            return self.listing(asked)
        with self.server.lock:
            content = self.server.objects.get(self.name())
        if content is None:
            return self.answer(404)
        headers = {"ETag": tag(content), "Last_Modified": formatdate(0, usegmt=True)}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part is None:
            return self.answer(200, content, **headers)
        first, last = int(part[1]), min(int(part[2] or len(content) - 1), len(content) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        return self.answer(206, content[first:last + 1], **headers)

    do_HEAD = do_GET

    def listing(self, asked):
        """The objects with a prefix; those behind a delimiter as their common prefixes."""
        prefix, delimiter = asked.get("prefix", [""])[0], asked.get("delimiter", [""])[0]
        home = self.name().rstrip("/") + "/"
        after = asked.get("start-after", [""])[0]
        with self.server.lock:
            objects = {name.removeprefix(home): content for name, content in self.server.objects.items()}
        rows, common = [], set()
        for name, content in sorted(objects.items()):
            if not name.startswith(prefix) or name <= after:
                continue
            inner = name[len(prefix):]
            if delimiter and delimiter in inner:
                common.add(prefix + inner.split(delimiter)[0] + delimiter)
            else:
                rows.append(ROW.format(escape(name), escape(tag(content)), len(content)))
        rows += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(common)]
        self.answer(200, LIST.format("".join(rows)).encode(), Content_Type="application/xml")

    def do_DELETE(self):
        """Removes an object."""
        with self.server.lock:
            self.server.objects.pop(self.name(), None)
        self.answer(204)


class Bucket:
    """The server, for the time of a `with`."""

    def __init__(self, home):
        self.certificates = home / "authority"
        self.certificates.mkdir()
        openssl = needs("openssl", "openssl")
        authority, key = self.certificates / "authority.pem", home / "authority.key"
        quiet = {"capture_output": True}
        run(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=a private authority", "-keyout", key, "-out", authority, **quiet)
        request, own = home / "server.csr", home / "server.key"
        run(openssl, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost",
            "-keyout", own, "-out", request, **quiet)
        (home / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        run(openssl, "x509", "-req", "-in", request, "-CA", authority, "-CAkey", key, "-days", "2",
            "-extfile", home / "names", "-out", home / "server.pem", **quiet)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.server.objects, self.server.lock = {}, threading.Lock()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(home / "server.pem", own)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.endpoint = f"https://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
