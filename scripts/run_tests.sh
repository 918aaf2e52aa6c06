#!/bin/sh
# Run the tests as three pytests side by side: those on clusters mostly wait, the others mostly compute and are nicer.
#     run_tests.sh PYTHON [OPTION OF PYTEST...]
# The first one's output is shown as it comes, that of the others when all have ended. Fails if one of them fails.
set -u
python=$1
shift
clusters=
frameworks=
others=tests
for part in connect data diagnostics local ml spark spark_edges trackers test_cli.py test_demo.py test_docs.py \
    test_horovod_scripts.py test_notebooks.py; do
    clusters="$clusters tests/integration/$part"
    others="$others --ignore=tests/integration/$part"
done
for part in keras ml tensorflow; do
    frameworks="$frameworks tests/unit/$part"
    others="$others --ignore=tests/unit/$part"
done
set -- --durations=40 "$@"

output=$(mktemp -d)
# shellcheck disable=SC2086
nice -n 5 "$python" -m pytest $others "$@" >"$output/others" 2>&1 &
second=$!
# shellcheck disable=SC2086
nice -n 5 "$python" -m pytest $frameworks "$@" >"$output/frameworks" 2>&1 &
third=$!
trap 'kill "$second" "$third" 2>/dev/null; rm -rf "$output"' EXIT
trap 'exit 130' INT TERM
echo "pytest $others: shown at the end"
echo "pytest$frameworks: shown at the end"
echo "pytest$clusters:"
# shellcheck disable=SC2086
"$python" -m pytest $clusters "$@"
first_status=$?
wait "$second"
second_status=$?
wait "$third"
third_status=$?
cat "$output/others" "$output/frameworks"
echo "tests on clusters ended with $first_status, of Keras and estimators with $third_status, the others with" \
    "$second_status"
[ "$first_status" = 0 ] && [ "$second_status" = 0 ] && [ "$third_status" = 0 ]
