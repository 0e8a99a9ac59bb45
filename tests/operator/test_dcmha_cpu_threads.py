"""Sharing work out to threads: who gets what, in which state, and what is left afterwards."""

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dcformer import dcmha_cpu_threads
from dcformer.dcmha_cpu_threads import available_threads, deal, run_shares


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_hands_have_about_equal_costs():
    costs = [1, 2, 3, 4, 5, 6, 7, 8]
    hands = deal(costs, costs, 2)
    assert sorted(cost for hand in hands for cost in hand) == costs
    assert [sum(hand) for hand in hands] == [18, 18]


def test_no_hand_is_empty():
    assert deal(["a", "b"], [1, 1], 5) == [["a"], ["b"]]


def test_results_keep_the_order_of_the_shares(two_threads):
    assert run_shares(lambda share: share * 10, [3, 1, 2]) == [30, 10, 20]


def test_a_lone_share_stays_in_the_thread_of_the_caller():
    assert run_shares(lambda share: threading.get_ident(), ["only"]) == [threading.get_ident()]


def test_each_share_has_a_thread_of_its_own_with_one_thread_of_torch(two_threads):
    together = threading.Barrier(2, timeout=30)

    def work(share):
        together.wait()
        torch.ones(2**18).add_(1)  # what asks for the number of threads for the first time
        return threading.get_ident(), torch.get_num_threads()

    (one, of_one), (other, of_other) = run_shares(work, ["one", "other"])
    assert len({one, other, threading.get_ident()}) == 3
    assert (of_one, of_other) == (1, 1)


def test_the_threads_of_everyone_else_stay_as_they_were(two_threads):
    run_shares(lambda share: None, range(5))
    assert torch.get_num_threads() == 2
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert elsewhere == [2]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_shares_are_worked_on_without_gradients_in_the_mode_of_the_caller(inference):
    with torch.inference_mode(inference):
        states = run_shares(lambda share: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()), range(2))
    assert states == [(False, inference)] * 2


def test_an_error_is_raised_once_all_shares_are_done():
    done = []

    def work(share):
        if share == 0:
            raise ArithmeticError("share 0")
        done.append(share)

    with pytest.raises(ArithmeticError, match="share 0"):
        run_shares(work, range(4))
    assert sorted(done) == [1, 2, 3]
    assert run_shares(lambda share: share, range(2)) == [0, 1]


def test_a_mode_that_watches_operations_keeps_them_in_its_own_thread(two_threads):
    with FlopCounterMode(display=False):
        assert available_threads() == 1
    assert available_threads() == 2


def shares_of_a_child(results) -> None:
    results.put(run_shares(lambda share: share + 1, range(3)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_threads_of_its_own():
    run_shares(lambda share: share, range(3))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=shares_of_a_child, args=(results,))
    child.start()
    assert results.get(timeout=60) == [1, 2, 3]
    child.join(timeout=60)
    assert child.exitcode == 0


def test_a_process_ends_while_its_threads_wait():
    # The module alone: importing all of the package takes seconds.
    code = (
        "import runpy, sys; run = runpy.run_path(sys.argv[1])['run_shares']; print(run(lambda share: share, range(3)))"
    )
    command = [sys.executable, "-c", code, dcmha_cpu_threads.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[0, 1, 2]", "")
