import http.server
import signal
import threading

import pytest

from flash_tf.training import maintenance


@pytest.fixture
def vm(monkeypatch):
    """What a Cloud VM answers, by name; it can be changed."""
    answers = {"maintenance-event": "NONE", "preempted": "FALSE"}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["Metadata-Flavor"] == "Google" else 403)
            self.end_headers()
            self.wfile.write(answers[self.path.rpartition("/")[2]].encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(maintenance, "METADATA", f"http://localhost:{server.server_port}/instance")
        monkeypatch.setattr(maintenance, "LOOK", 0.05)
        yield answers
        server.shutdown()


@pytest.fixture
def signals():
    """Set when SIGTERM comes."""
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("name", "value"), [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("preempted", "TRUE")]
)
def test_a_vm_that_will_stop_sends_sigterm_once_and_a_line_says_so(vm, signals, name, value):
    lines = []
    with maintenance.watched(lines.append):
        assert not signals.wait(0.2)
        vm[name] = value
        assert signals.wait(5)
        signals.clear()
        assert not signals.wait(0.2)
    assert lines == [f"this VM will stop ({name} {value}): ending after this loop of steps"]


def test_nothing_is_asked_after_the_end_and_a_machine_elsewhere_goes_on(vm, signals, monkeypatch):
    with maintenance.watched(print):
        pass
    vm["preempted"] = "TRUE"
    assert not signals.wait(0.2)
    monkeypatch.setattr(maintenance, "METADATA", "http://localhost:1/instance")
    with maintenance.watched(print):
        assert not signals.wait(0.2)
