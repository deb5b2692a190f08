"""The lock that threads get in turn."""

import threading
import time

from lkv.utils.fair_lock import FairLock


def test_one_thread_at_a_time_in_the_order_of_asking():
    lock, order, inside = FairLock(), [], []

    def work(name):
        with lock:
            inside.append(name)
            order.append(name)
            time.sleep(0.001)
            assert inside == [name]
            inside.remove(name)

    threads = []
    with lock:
        for name in range(5):
            threads.append(threading.Thread(target=work, args=(name,)))
            threads[-1].start()
            while len(lock._waiting) < name + 2:
                time.sleep(0.001)
    work(5)  # who asks again at once comes last
    for thread in threads:
        thread.join()
    assert order == list(range(6))
