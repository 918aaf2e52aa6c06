#!/bin/sh
# Run the tests as two pytests side by side: those on clusters mostly wait, the others mostly compute and are nicer.
#     run_tests.sh PYTHON [OPTION OF PYTEST...]
# The first one's output is shown as it comes, the second one's when both have ended. Fails if either of them fails.
set -u
python=$1
shift
clusters=
others=tests
for part in connect data diagnostics local ml spark spark_edges test_cli.py test_demo.py test_docs.py \
    test_horovod_scripts.py test_notebooks.py; do
    clusters="$clusters tests/integration/$part"
    others="$others --ignore=tests/integration/$part"
done
set -- --durations=40 "$@"

output=$(mktemp)
# shellcheck disable=SC2086
nice -n 5 "$python" -m pytest $others "$@" >"$output" 2>&1 &
second=$!
trap 'kill "$second" 2>/dev/null; rm -f "$output"' EXIT
trap 'exit 130' INT TERM
echo "pytest $others: shown at the end"
echo "pytest$clusters:"
# shellcheck disable=SC2086
"$python" -m pytest $clusters "$@"
first_status=$?
wait "$second"
second_status=$?
cat "$output"
echo "tests on clusters ended with $first_status, the others with $second_status"
[ "$first_status" = 0 ] && [ "$second_status" = 0 ]
