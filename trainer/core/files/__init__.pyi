from trainer.core.files import storage as storage
from trainer.core.files.reading import (
    MOST_BYTES as MOST_BYTES,
    check_expansion as check_expansion,
    chunk_of as chunk_of,
    open_file as open_file,
    parse_json as parse_json,
    read_at_most as read_at_most,
    read_file as read_file,
    read_json as read_json,
    read_member as read_member,
)
from trainer.core.files.suffixes import check_suffix as check_suffix
from trainer.core.files.writing import (
    flush as flush,
    local_file as local_file,
    new_file as new_file,
    open_log as open_log,
    replace_file as replace_file,
)
