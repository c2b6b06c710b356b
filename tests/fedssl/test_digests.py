"""The two digests, by published test vectors."""

from fedssl.digests import checksum, identity, new_checksum, new_identity


def test_digests_of_nothing_and_of_parts():
    assert identity(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert checksum(b"") == "2d06800538d394c2"
    for new, whole in ((new_checksum, checksum), (new_identity, identity)):
        continued = new(b"a")
        continued.update(memoryview(b"bc"))
        assert continued.hexdigest() == whole(b"abc")
