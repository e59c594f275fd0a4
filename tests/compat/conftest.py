from tests.parallel.conftest import single_rank_group  # noqa: F401  (a fixture)
