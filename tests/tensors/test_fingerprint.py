"""What a fingerprint of tensors notices, column by column."""

import torch

from fp4adam.tensors.fingerprint import Column, Fingerprint, Mark


def tensors(n):
    return [torch.zeros(3) for _ in range(n)]


def test_columns_behind_an_empty_one_are_read():
    watched = tensors(2)
    fingerprint = Fingerprint([Column([]), Column(watched, placed=True, versioned=True)])
    assert fingerprint.unchanged()
    watched[1].add_(1)
    assert not fingerprint.unchanged()


def test_each_column_notices_what_it_is_for():
    same, placed, versioned = tensors(2), tensors(2), tensors(2)
    fingerprint = Fingerprint(
        [Column(same, same=True), Column(placed, placed=True), Column(versioned, versioned=True)]
    )
    same[0].add_(1)
    placed[0].add_(1)
    same[1].data = torch.ones(3)
    versioned[1].data = torch.ones(3)
    assert fingerprint.unchanged()
    versioned[0].add_(1)  # by a step
    fingerprint.record()
    versioned[1].add_(1)
    assert not fingerprint.unchanged()
    fingerprint = Fingerprint([Column(same, same=True), Column(placed, placed=True)])
    kept = placed[0].data
    placed[0].data = torch.ones(3)
    assert not fingerprint.unchanged()
    placed[0].data = kept
    assert fingerprint.unchanged()
    old, same[0] = same[0], torch.ones(3)
    assert not fingerprint.unchanged()
    same[0] = old
    assert fingerprint.unchanged()


def test_marks_follow_the_versions_of_all_their_tensors():
    watched = tensors(3)
    fingerprint = Fingerprint([Column(watched, versioned=True)])
    before, mark = (Mark("memory", watched[1:]) for _ in range(2))
    mark.follow(fingerprint.versions, range(1, 3))
    assert mark.is_same(before)
    assert fingerprint.unchanged()
    watched[2].add_(1)
    assert mark.is_same(before)
    fingerprint.record()
    assert not mark.is_same(before) and mark.is_same(Mark("memory", watched[1:]))
