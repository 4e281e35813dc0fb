import tracemalloc

from stemma.prefix.eviction.candidates import CandidateHeap


def test_ranks_may_grow_while_a_block_is_a_candidate() -> None:
    ranks = {1: 10, 2: 20, 3: 30}
    heap = CandidateHeap(ranks.__getitem__)
    for block_id in ranks:
        heap.offer(block_id)
    ranks[1] = 25
    assert heap.lowest() == 2
    heap.withdraw(2)
    assert (heap.lowest(), len(heap), 2 in heap) == (1, 2, False)


def test_memory_is_that_of_the_candidates() -> None:
    heap = CandidateHeap(lambda block_id: block_id)
    heap.offer(0)
    tracemalloc.start()
    for block_id in range(1, 50_000):
        heap.offer(block_id)
        heap.withdraw(block_id)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(heap) == 1
    assert held < 1 << 16  # 50,000 entries would take 2 MB
