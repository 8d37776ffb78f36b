// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package e2e runs stories on real clusters. A story is a script
// (testdata/*/*.txtar) that reads as a specification: it uses the driver as a user
// does and checks the API objects, the pods, and the node. Each story has its own
// namespace, $NS. The command clean deletes the story's objects and checks that
// the driver left nothing on any node.
//
// `make e2e` runs the stories on new clusters; `make e2e RUN=REGEXP` runs only stories with matching names. E2E_KEEP=1
// keeps the clusters for inspection. E2E_CLUSTER=DIR runs the stories on an existing cluster. E2E_CARRIES=N says that
// the cluster carries only N Mbit/s, see the command measure. E2E_RUNTIME and E2E_OCI_RUNTIME select the container
// runtime of new clusters, E2E_KUBERNETES, E2E_KUBELET, and E2E_GATES the versions and feature gates of Kubernetes (see
// test/cluster).
package e2e

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

const (
	waitTimeout = 90 * time.Second
	tolerance   = 0.10
	serverPort  = 5001
	system      = "dra-shared-system"
)

// suite is a cluster that stories run on, and the server for measurements.
type suite struct {
	cluster *clusterclient.Cluster
	server  string
	nodes   []string
	// carries is the rate in Mbit/s that the cluster carries at least, or 0 if it
	// carries every rate that stories grant.
	carries float64
}

func TestOneNode(t *testing.T) {
	runStories(t, "testdata/one-node", ".cluster-e2e", clusterclient.Options{Nodes: 1})
}

// TestAddresses runs the stories about links' addresses: static ones and addresses from AddressPools.
func TestAddresses(t *testing.T) {
	runStories(t, "testdata/addresses", ".cluster-e2e-addresses", clusterclient.Options{Nodes: 1})
}

// TestIsolation runs the stories that show that a pod cannot affect other pods.
func TestIsolation(t *testing.T) {
	runStories(t, "testdata/isolation", ".cluster-e2e-isolation", clusterclient.Options{Nodes: 1})
}

// TestTimeouts runs the stories that mostly wait for the timeouts of the hook, the kubelet, and the plugin. They would
// delay TestOneNode.
func TestTimeouts(t *testing.T) {
	runStories(t, "testdata/timeouts", ".cluster-e2e-timeouts", clusterclient.Options{Nodes: 1})
}

// TestPodGroups_bridgeMode runs on a cluster without Kubernetes' own PodGroups.
func TestPodGroups_bridgeMode(t *testing.T) {
	runStories(t, "testdata/podgroups", ".cluster-e2e-bridge", clusterclient.Options{Nodes: 1})
}

// TestPodGroups_nativeMode runs the same stories with all feature gates for dynamic resource allocation and workloads.
// Kubernetes then reserves claims for PodGroups. Two nodes exist only here and in TestAccelerators.
func TestPodGroups_nativeMode(t *testing.T) {
	if os.Getenv("E2E_CLUSTER") != "" && os.Getenv("E2E_NATIVE") == "" {
		t.Skip("needs two nodes and all feature gates; E2E_NATIVE=1 asserts that E2E_CLUSTER has them")
	}
	runStories(t, "testdata/two-nodes testdata/podgroups testdata/native-mode", ".cluster-e2e-native",
		clusterclient.Options{Nodes: 2, Gates: "all"})
}

// TestGuestNode runs on a node that is a virtual machine with its own kernel, systemd, cgroup v2, and AppArmor; see
// test/lab. Its stories are in testdata/guest-node, plus the other suites' stories that a node's kernel, init system,
// or security module can affect.
func TestGuestNode(t *testing.T) {
	if os.Getenv("E2E_GUEST") == "" || os.Getenv("E2E_CLUSTER") == "" {
		t.Skip("needs a cluster whose node is a guest: run `make lab-stories`")
	}
	c, err := clusterclient.New(".cluster-lab")
	if err != nil {
		t.Fatal(err)
	}
	c.Values = strings.Fields(os.Getenv("E2E_HELM"))
	runStoriesOn(t, "testdata/guest-node testdata/addresses/addresses testdata/one-node/attach-failure "+
		"testdata/one-node/component-failures testdata/isolation/enforcement-repair testdata/one-node/multiple-containers "+
		"testdata/one-node/nic-changes", c, clusterclient.Options{Nodes: 1})
}

func TestModeChange(t *testing.T) {
	if os.Getenv("E2E_CLUSTER") != "" && os.Getenv("E2E_MODES") == "" {
		t.Skip("switches the feature gates of the cluster; E2E_MODES=1 allows that for E2E_CLUSTER")
	}
	runStories(t, "testdata/mode-change", ".cluster-e2e-modes", clusterclient.Options{Nodes: 1})
}

// TestNoConsumableCapacity runs on a cluster with an API server that drops the fields that make devices shareable.
// There, the plugin does not become ready, so the installation does not wait for it.
func TestNoConsumableCapacity(t *testing.T) {
	if os.Getenv("E2E_CLUSTER") != "" {
		t.Skip("needs a cluster without the feature gate DRAConsumableCapacity, and E2E_CLUSTER has it")
	}
	requireCluster(t)
	c, err := clusterclient.New(".cluster-e2e-no-capacity")
	if err != nil {
		t.Fatal(err)
	}
	c.Values = []string{"--wait=hookOnly"}
	runStoriesOn(t, "testdata/no-consumable-capacity", c, clusterclient.Options{Nodes: 1, Gates: "no-capacity"})
}

// runStories runs the stories in the directories on the cluster in dir. An element of
// directories can also be a story's file without its extension.
func runStories(t *testing.T, directories, dir string, o clusterclient.Options) {
	t.Helper()
	requireCluster(t)
	c, err := clusterclient.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	runStoriesOn(t, directories, c, o)
}

func requireCluster(t *testing.T) {
	t.Helper()
	if os.Getenv("E2E") == "" && os.Getenv("E2E_CLUSTER") == "" {
		t.Skip("needs a cluster: run `make e2e`")
	}
}

func runStoriesOn(t *testing.T, directories string, c *clusterclient.Cluster, o clusterclient.Options) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	var files []string
	for _, directory := range strings.Fields(directories) {
		found, err := filepath.Glob(filepath.Join(directory, "*.txtar"))
		if err == nil && len(found) == 0 {
			found, err = filepath.Glob(directory + ".txtar")
		}
		if err != nil || len(found) == 0 {
			t.Fatalf("find stories in %s: found %d: %v", directory, len(found), err)
		}
		files = append(files, found...)
	}
	requireSelected(t, storyNames(files))
	r := newReporter(t)
	s := start(ctx, t, c, o)
	testscript.RunT(r, testscript.Params{
		Files:               files,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Condition: func(name string) (bool, error) {
			switch name {
			case "native":
				return o.Gates == "all", nil
			case "containerd-1.7":
				return os.Getenv("E2E_RUNTIME") == name, nil
			case "user-namespaces":
				return s.hasUserNamespaces(ctx)
			case "taints":
				return s.storesTaints(ctx)
			case "cookie":
				return s.readsCookies(ctx)
			case "selinux":
				_, err := s.cluster.Node(ctx, "n1", "test", "-e", "/sys/fs/selinux/enforce")
				return err == nil, nil
			case "user-extra":
				out, err := s.cluster.Kubectl(ctx, "options")
				return strings.Contains(out, "--as-user-extra"), err
			default:
				return false, fmt.Errorf("unknown condition %s", name)
			}
		},
		Setup: func(env *testscript.Env) error { return s.setup(ctx, env) },
		Cmds:  s.commands(),
	})
}

// readsCookies reports whether BPF programs on the nodes can get the cookie of a sender's network
// namespace. A kernel in lockdown=confidentiality does not let programs read it, so the kernel
// must have the helper; nettool asks the kernel. The file is absent on kernels without lockdown.
func (s *suite) readsCookies(ctx context.Context) (bool, error) {
	lockdown, err := s.cluster.Node(ctx, "n1", "sh", "-c", "cat /sys/kernel/security/lockdown || true")
	if err != nil || !strings.Contains(lockdown, "[confidentiality]") {
		return err == nil, err
	}
	has, err := s.cluster.Node(ctx, "n1", filepath.Join(s.cluster.Root, "bin/nettool"), "cookie-helper")
	return strings.TrimSpace(has) == "true", err
}

// hasUserNamespaces reports whether the container runtime supports pods with their own
// user namespace.
func (s *suite) hasUserNamespaces(ctx context.Context) (bool, error) {
	out, err := s.cluster.Kubectl(ctx, "get", "node", s.nodes[0],
		"-o", "jsonpath={.status.runtimeHandlers[*].features.userNamespaces}")
	return strings.Contains(out, "true"), err
}

// storesTaints reports whether the API server stores taints of devices, as it does by default
// since Kubernetes 1.36.
func (s *suite) storesTaints(ctx context.Context) (bool, error) {
	out, err := s.cluster.Kubectl(ctx, "get", "--raw", "/metrics")
	enabled := regexp.MustCompile(`(?m)^kubernetes_feature_enabled\{name="DRADeviceTaints",.*\} 1$`)
	return enabled.MatchString(out), err
}

// storyNames returns the names of the subtests for story files.
func storyNames(files []string) (names []string) {
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".txtar"))
	}
	return names
}

// requireSelected skips the suite if the flag -run selects none of its subtests, to avoid starting an unused cluster.
func requireSelected(t *testing.T, names []string) {
	t.Helper()
	_, pattern, _ := strings.Cut(flag.Lookup("test.run").Value.String(), "/")
	selected, err := regexp.Compile(pattern)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(names, selected.MatchString) {
		t.Skipf("-run selects no subtest of this suite: %s", strings.Join(names, ", "))
	}
}

// start starts the cluster, or uses E2E_CLUSTER, and starts the server for
// measurements. The cluster ends with the test.
func start(ctx context.Context, t *testing.T, c *clusterclient.Cluster, o clusterclient.Options) *suite {
	t.Helper()
	if existing := os.Getenv("E2E_CLUSTER"); existing != "" {
		c.Dir = existing
		if !filepath.IsAbs(existing) {
			c.Dir = filepath.Join(c.Root, existing)
		}
	} else {
		if err := c.Down(ctx); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if os.Getenv("E2E_KEEP") != "" {
				return
			}
			if err := c.Down(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		})
		o.Runtime, o.OCIRuntime = os.Getenv("E2E_RUNTIME"), os.Getenv("E2E_OCI_RUNTIME")
		o.Kubernetes, o.Kubelet = os.Getenv("E2E_KUBERNETES"), os.Getenv("E2E_KUBELET")
		o.Gates = cmp.Or(os.Getenv("E2E_GATES"), o.Gates)
		if err := c.Up(ctx, o, os.Stdout); err != nil {
			t.Fatal(err)
		}
	}
	server, err := c.Serve(ctx, serverPort)
	if err != nil {
		t.Fatal(err)
	}
	s := &suite{cluster: c, server: server, nodes: []string{"n1", "n2"}[:o.Nodes]}
	if limit := os.Getenv("E2E_CARRIES"); limit != "" {
		if s.carries, err = strconv.ParseFloat(limit, 64); err != nil {
			t.Fatalf("E2E_CARRIES: %v", err)
		}
	}
	return s
}

// setup creates the story's namespace and sets the variables that it may use.
func (s *suite) setup(ctx context.Context, env *testscript.Env) error {
	namespace := "e2e-" + strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
	env.Setenv("NS", namespace)
	env.Setenv("SERVER", s.server)
	env.Setenv("ROOT", s.cluster.Root)
	env.Setenv("CLUSTER", s.cluster.Dir)
	r, ok := env.T().(story)
	if !ok {
		return errors.New("the testscript.T of the story is not a story")
	}
	r.logState = sync.OnceFunc(func() {
		if r.Failed() {
			r.Log(clusterState(context.WithoutCancel(ctx), s.cluster, namespace))
		}
	})
	env.Values[reporterKey{}] = r
	if _, err := s.cluster.Kubectl(ctx, "create", "namespace", namespace); err != nil {
		return err
	}
	env.Defer(func() {
		r.logState()
		ctx := context.WithoutCancel(ctx)
		if _, err := s.cluster.Kubectl(ctx, "delete", "namespace", namespace, "--wait=false"); err != nil {
			r.Errorf("teardown of the story: %v", err)
		}
	})
	return nil
}
