// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const apiServer = "kube-apiserver"

// waiting is the message that the controller reports each failed attempt to start with.
const waiting = "Failed to start; retrying"

// The controller starts before the API server, continues after a restart of the API
// server, and loses the connection for longer than the lease of the leading replica.
// The test runs the controller's program and restarts it when it ends, as the kubelet
// does.
//
// The name of this file makes the test one of the last: after an outage, the informers
// of the scheduler and of the simulated nodes may wait for a minute before they
// connect again.
func TestController_waitsForAPIServer(t *testing.T) {
	e := requireTestEnv(t)
	t.Cleanup(func() { e.startAPIServer(t) })

	e.stopAPIServer(t)
	c := e.startProgram(t)
	c.awaitAttempts(t, 3)
	c.checkServed(t, "while the API server has not been started")
	c.checkExits(t, 0, "while the API server has not been started")
	e.startAPIServer(t)
	c.awaitReady(t)
	c.checkExits(t, 0, "when the API server was started")
	ns := e.createNamespace(t, "outage")
	e.awaitGeneratedClaim(t, ns, "first")

	e.stopAPIServer(t)
	e.startAPIServer(t)
	c.awaitReady(t)
	e.awaitGeneratedClaim(t, ns, "after-a-restart")
	c.checkExits(t, 0, "when the API server was restarted")

	e.stopAPIServer(t)
	attempts := c.attempts()
	c.awaitAttempts(t, attempts+1)
	c.checkServed(t, "while the API server is unavailable")
	// A replica that loses the lease must end, because another one may lead.
	c.checkExits(t, 1, "when the API server was unavailable for longer than the lease")
	e.startAPIServer(t)
	c.awaitReady(t)
	e.awaitGeneratedClaim(t, ns, "after-an-outage")
	c.checkExits(t, 1, "when the API server returned")
}

// awaitGeneratedClaim creates a PodGroup and waits until the controller has created
// its claim.
func (e *testEnv) awaitGeneratedClaim(t *testing.T, ns, group string) {
	t.Helper()
	pg := e.mustCreateGroup(t, ns, group)
	eventually.Eventually(t, timeout, "PodGroup "+group+" has its claim", func() error {
		claims, err := e.claims(t.Context(), ns)
		if err != nil {
			return err
		}
		for i := range claims {
			if metav1.IsControlledBy(&claims[i], pg) {
				return nil
			}
		}
		return fmt.Errorf("none of %d claims is generated for it", len(claims))
	})
}

func (e *testEnv) stopAPIServer(t *testing.T) {
	t.Helper()
	if err := e.cluster.Stop(context.Background(), apiServer); err != nil {
		t.Fatal(err)
	}
}

// startAPIServer starts the API server and waits until it is ready.
func (e *testEnv) startAPIServer(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	if err := e.cluster.Start(ctx, apiServer); err != nil {
		t.Fatal(err)
	}
	e.awaitAPIServer(t)
}

func (e *testEnv) awaitAPIServer(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	eventually.Eventually(t, timeout, "the API server is ready", func() error {
		return e.kube.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// Addresses of the controller's program in the cluster's network namespace.
const (
	programHealth  = "127.0.0.1:18081"
	programMetrics = "127.0.0.1:18082"
)

// program is the controller's program. It is started again whenever it ends.
type program struct {
	mu    sync.Mutex
	log   bytes.Buffer
	exits []error
}

// startProgram starts the controller's program with the identity that the chart
// gives it. The program ends with the test.
func (e *testEnv) startProgram(t *testing.T) *program {
	t.Helper()
	dir := t.TempDir()
	kubeconfig, configuration := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "config.yaml")
	if err := e.writeControllerKubeconfig(kubeconfig); err != nil {
		t.Fatal(err)
	}
	c := driverConfig()
	c.SetGroupVersionKind(config.GroupVersion.WithKind("DriverConfig"))
	raw, err := yaml.Marshal(c)
	if err == nil {
		err = os.WriteFile(configuration, raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &program{}
	ctx, cancel := context.WithCancel(context.Background())
	spawn := func() (*exec.Cmd, error) {
		cmd := exec.CommandContext(ctx, filepath.Join(e.cluster.Root, "bin/dra-shared-controller"),
			"--kubeconfig="+kubeconfig, "--config="+configuration, "--namespace="+system,
			"--slices-owner=dra-shared-controller", "--health-address="+programHealth, "--metrics-address="+programMetrics)
		cmd.Stderr = p
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = timeout
		return cmd, cmd.Start()
	}
	cmd, err := spawn()
	if err != nil {
		t.Fatalf("start the controller's program: %v", err)
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for err == nil {
			exit := cmd.Wait()
			if ctx.Err() != nil {
				return
			}
			p.exited(exit)
			cmd, err = spawn()
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-stopped
		if t.Failed() {
			t.Logf("log of the controller:\n%s", p.text())
		}
	})
	return p
}

// writeControllerKubeconfig writes the cluster's kubeconfig with the identity of
// controllerConfig.
func (e *testEnv) writeControllerKubeconfig(path string) error {
	kubeconfig, err := clientcmd.LoadFromFile(filepath.Join(e.cluster.Dir, "kubeconfig"))
	if err != nil {
		return err
	}
	identity := e.controllerConfig().Impersonate
	for _, user := range kubeconfig.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = identity.UserName, identity.Groups
	}
	return clientcmd.WriteToFile(*kubeconfig, path)
}

// Write adds to the log.
func (p *program) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *program) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

func (p *program) exited(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exits = append(p.exits, err)
}

// ends returns the results of the runs of the program that have ended.
func (p *program) ends() []error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.exits)
}

// attempts returns the number of failed attempts to start.
func (p *program) attempts() int { return strings.Count(p.text(), waiting) }

func (p *program) awaitAttempts(t *testing.T, want int) {
	t.Helper()
	condition := fmt.Sprintf("the controller has failed to start %d times", want)
	eventually.Eventually(t, timeout, condition, func() error {
		if got := p.attempts(); got < want {
			return fmt.Errorf("it logs %q %d times and has ended with %v", waiting, got, p.ends())
		}
		return nil
	})
}

func (p *program) awaitReady(t *testing.T) {
	t.Helper()
	eventually.Eventually(t, timeout, "the controller is ready", func() error {
		return checkHTTP(programHealth+"/readyz", http.StatusOK, "")
	})
}

// checkServed checks what the controller answers while it waits.
func (p *program) checkServed(t *testing.T, when string) {
	t.Helper()
	err := errors.Join(
		checkHTTP(programHealth+"/healthz", http.StatusOK, ""),
		checkHTTP(programHealth+"/readyz", http.StatusInternalServerError, ""),
		checkHTTP(programMetrics+"/metrics", http.StatusOK, "rest_client_requests_total"),
	)
	if err != nil {
		t.Errorf("%s: %v", when, err)
	}
}

func (p *program) checkExits(t *testing.T, want int, when string) {
	t.Helper()
	if ends := p.ends(); len(ends) != want {
		t.Errorf("%s: the controller has ended %d times, want %d: %v", when, len(ends), want, ends)
	}
}

// checkHTTP returns an error unless the server at the address and path answers with
// the status and a body that contains text.
func checkHTTP(url string, status int, text string) error {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get("http://" + url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != status || !strings.Contains(string(body), text) {
		return fmt.Errorf("%s answers %s, want %d with %q:\n%.500s", url, response.Status, status, text, body)
	}
	return nil
}
