"""`flash-tf prepare` in this process, without Apache Beam, and runs on what it writes."""

from flash_tf import config
from flash_tf.preparing.prepare import prepare
from tests.training import runs


class Here:
    """Does tasks one after the other, no more than so many, and notes them."""

    def __init__(self, most=None):
        self.most, self.done = most, []

    def __call__(self, work, tasks):
        for task in tasks:
            if len(self.done) == self.most:
                raise OSError("killed")
            work.do(task)
            self.done.append((task.split, task.number, task.unit is None))


def prepared(folder, **sections) -> str:
    """A config on text that is prepared in `folder/prepared`."""
    runs.corpus(folder)
    prepare(config.load(runs.write(folder, **sections)), f"{folder}/prepared", runs.Lines(), Here())
    source = {"type": "prepared", "path": f"{folder}/prepared"}
    return runs.write(folder, **{**sections, "data": {**sections.get("data", {}), "source": source}})


def of_worker(path, model_dir, addresses, index, *overrides, stop_after=None):
    """Trains as one of several workers; the last evaluation."""
    told = f"strategy={{type: multi_worker, workers: [{', '.join(addresses)}], index: {index}}}"
    return runs.train(path, model_dir, told, *overrides, stop_after=stop_after)
