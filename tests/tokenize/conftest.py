from tests.support.data_cache import own_cache as own_cache
