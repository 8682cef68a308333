"""The mixes of hosts that every algorithm must work on: a letter for each rank, equal letters on one host."""

ONE_HOST = ["a", "aa", "aaa", "aaaa"]
SEVERAL_HOSTS = ["ab", "abc", "abcde", "aabb", "aab", "abacb"]
ALL = ONE_HOST + SEVERAL_HOSTS


def algorithms(layout: str) -> list[str]:
    common = ["auto", "ring", "tree", "hierarchical"]
    return ["direct", *common] if len(set(layout)) == 1 else common
