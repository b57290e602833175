"""A server in small, as a process of its own: loads exports and answers requests with TensorFlow and TF-Text alone.

Reads pickles from standard input until it ends: a folder and a list of `(signature, arguments, before)`, where `before`
is the number of the request whose state this one goes on from, or None. Writes to standard output, for each folder, a
dictionary of arrays for each request, or a string that says what was wrong; and the names of the modules that it has.
"""

import pickle
import sys

import tensorflow as tf
import tensorflow_text  # noqa: F401  its operators


def ask(signatures, name, arguments, state):
    given = {key: tf.convert_to_tensor(x) for key, x in arguments.items()}
    try:
        return signatures[name](**given, **{key: x for key, x in state.items() if key != "logits"})
    except (tf.errors.OpError, TypeError, ValueError) as error:
        return str(error)


def answers(folder, requests):
    loaded, found = tf.saved_model.load(folder), []  # kept: its signatures do not keep it
    for name, arguments, before in requests:
        found.append(ask(loaded.signatures, name, arguments, {} if before is None else found[before]))
    return [x if isinstance(x, str) else {key: value.numpy() for key, value in x.items()} for x in found]


if __name__ == "__main__":
    with sys.stdin.buffer as requests, sys.stdout.buffer as out:
        while True:
            try:
                asked = pickle.load(requests)
            except EOFError:
                break
            modules = sorted({name.split(".")[0] for name in sys.modules})
            pickle.dump((answers(*asked), modules), out)
            out.flush()
